"""What clients can name: configured templates, allowed images, and images that have to be fetched first."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from sandgate_errors import FailedPrecondition, NotFound, Unavailable
from sandgate_plugin_docker.images import is_reference
from sandgate_plugin_docker.settings import DockerSettings
from sandgate_testing.engine import docker


@dataclass
class Registry:
    """A registry of this machine that has one image, and can be told to behave badly."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""
    password: str | None = None
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def offer(self, image: str, folder) -> None:
        """Take an image's layers as the engine saves them."""
        archive = folder / "image.tar"
        docker("save", "-o", str(archive), image)
        with tarfile.open(archive) as tar:
            about = json.load(tar.extractfile("manifest.json"))[0]
            config = tar.extractfile(about["Config"]).read()
            layers = [tar.extractfile(name).read() for name in about["Layers"]]
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
                "config": self._add("application/vnd.docker.container.image.v1+json", config),
                "layers": [self._add("application/vnd.docker.image.rootfs.diff.tar", layer) for layer in layers],
            }
        ).encode()

    def _add(self, kind: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"mediaType": kind, "size": len(data), "digest": digest}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        import base64

        if self.password is not None:
            expected = "Basic " + base64.b64encode(f"me:{self.password}".encode()).decode()
            if request.headers.get("Authorization") != expected:
                return web.json_response(
                    {"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]},
                    status=401,
                    headers={"WWW-Authenticate": 'Basic realm="test"'},
                )
        path = request.path
        if path == "/v2/":
            return web.json_response({})
        if "/manifests/" in path and "/there/" in path:
            self.asked += request.method == "GET"
            digest = f"sha256:{hashlib.sha256(self.manifest).hexdigest()}"
            kind = json.loads(self.manifest)["mediaType"]
            return web.Response(body=self.manifest, content_type=kind, headers={"Docker-Content-Digest": digest})
        digest = path.rpartition("/")[2]
        if digest in self.blobs:
            if self.stalled.is_set():
                await asyncio.sleep(60)
            return web.Response(body=self.blobs[digest])
        return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}, status=404)


@pytest.fixture
async def registry(gateway, tmp_path, monkeypatch) -> AsyncIterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    registry = Registry()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    registry.port = runner.addresses[0][1]
    # A layer of its own: one that the engine has is not fetched.
    mark = f"LABEL of={registry.port}"
    image = gateway.images.busybox(mark, f"ENV MARK={time.time_ns()}")
    await asyncio.to_thread(registry.offer, image, tmp_path)
    docker("rmi", image)
    gateway.images.busybox("LABEL unused=1")
    yield registry
    await runner.cleanup()
    # An image that a container uses would only lose its name.
    for name in gateway.containers():
        docker("rm", "-f", "-v", name)
    for line in docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split():
        if line.startswith(registry.host):
            docker("rmi", "-f", line)


def test_ids_of_images_and_images_of_the_gateway_are_no_references():
    """An engine would answer for them, whosever they are."""
    for name in (
        "sha256:" + "a" * 64,
        "sandgate-0a1b2c3d/snapshots:s1",
        "docker.io/sandgate-0a1b2c3d/snapshots:s1",
        "index.docker.io/sandgate-0a1b2c3d/snapshots:s1",
        "../x",
        "a b",
        "A",
        "",
        "x" * 300,
        "-x",
        "a//b",
    ):
        assert not is_reference(name), name
    for name in ("debian", "debian:12", "ghcr.io/me/it@sha256:" + "a" * 64, "localhost:5000/a/b:c", "a_b/c-d"):
        assert is_reference(name), name


@pytest.mark.parametrize(
    ("pattern", "allowed", "not_allowed"),
    [
        ("ghcr.io/me/*", ["ghcr.io/me/a", "ghcr.io/me/a:1", f"ghcr.io/me/a@sha256:{'a' * 64}"], ["ghcr.io/me/a/b", "ghcr.io/mean/a"]),
        ("ghcr.io/me/**", ["ghcr.io/me/a", "ghcr.io/me/a/b:1"], ["ghcr.io/me", "x/ghcr.io/me/a"]),
        # A tag and a port are written alike.
        ("python:*", ["python:3.12"], ["python", "python:5000/a", "python:5000/a:3.12"]),
        ("python*", ["python", "python:3.12", "python2"], ["python.example/a"]),
        ("a.b/c", ["a.b/c"], ["axb/c", "a.b/c:1"]),
        ("[ab]?", [], ["a", "ab"]),
    ],
)  # fmt: skip
def test_pattern_stays_within_its_registry(pattern, allowed, not_allowed):
    settings = DockerSettings.read({"allow_images": [pattern]})
    assert [name for name in (*allowed, *not_allowed) if settings.allows(name)] == allowed


async def test_images_by_reference_only_where_allowed(gateway):
    image = gateway.images.busybox()
    async with gateway.backend() as backend:
        assert await backend.find_template(image) is None
    async with gateway.backend(allow_images=["ghcr.io/me/*"]) as backend:
        assert await backend.find_template(image) is None
    async with gateway.backend(allow_images=[image]) as backend:
        template = await backend.find_template(image)
        assert template is not None
        assert template.id == image
        assert await backend.find_template("busybox") is None
        await gateway.create(backend, image)


async def test_image_id_of_somebody_else_cannot_be_named(gateway):
    image = docker("inspect", "-f", "{{.Id}}", gateway.images.busybox()).stdout.strip()
    async with gateway.backend(allow_images=True) as backend:
        assert await backend.find_template(image) is None
        with pytest.raises(NotFound):
            await backend.find_template(image.removeprefix("sha256:")[:12])


async def test_aliases_mean_the_same(gateway):
    templates = {"py": {"image": gateway.images.debian(), "aliases": ["python", "code"]}}
    async with gateway.backend(templates=templates) as backend:
        assert [template.aliases for template in await backend.templates()] == [("python", "code")]
        assert await backend.find_template("code") == await backend.find_template("py")


async def test_missing_image_is_not_found(gateway, registry):
    async with gateway.backend(pull="missing", allow_images=True) as backend:
        with pytest.raises(NotFound, match="there is no image"):
            await backend.find_template(f"{registry.host}/absent/x:1")
        # Nobody listens there at all.
        with pytest.raises(Unavailable):
            await backend.find_template("127.0.0.1:9/a/b:1")


async def test_missing_image_is_fetched_once_for_all_who_wait(gateway, registry, run):
    reference = f"{registry.host}/there/it:1"
    async with gateway.backend(pull="missing", allow_images=True) as backend:
        found = await asyncio.gather(*(backend.find_template(reference) for _ in range(5)))
        assert len({template.id for template in found}) == 1
        assert "MARK" in found[0].envs
        assert registry.asked <= 2
        placement = await gateway.create(backend, reference)
        assert await run(placement, "id -un", shell="/bin/sh") == (0, "user\n")


async def test_private_registry_is_asked_with_the_credentials_of_this_machine(gateway, registry, tmp_path):
    import base64

    registry.password = "secret"
    reference = f"{registry.host}/there/private:1"
    async with gateway.backend(pull="missing", allow_images=True) as backend:
        with pytest.raises((NotFound, Unavailable)) as refused:
            await backend.find_template(reference)
        assert "secret" not in str(refused.value)
        auth = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        assert await backend.find_template(reference) is not None


async def test_stalled_pull_is_a_clear_error_in_time(gateway, registry):
    registry.stalled.set()
    async with gateway.backend(pull="missing", allow_images=True, pull_stall=1) as backend:
        with pytest.raises(Unavailable, match="could not be fetched") as error:
            await backend.find_template(f"{registry.host}/there/slow:1")
        assert error.value.retry_after


async def test_configured_entrypoint_is_what_a_sandbox_starts(gateway):
    image = gateway.images.busybox('ENTRYPOINT ["/bin/serve", "it now"]', 'CMD ["--fast"]')
    templates = {
        "own": {"image": image, "entrypoint": True},
        "given": {"image": image, "entrypoint": ["sleep", "1"]},
        "none": {"image": image, "ready_command": "true", "start_command": "x | y"},
    }
    async with gateway.backend(templates=templates) as backend:
        assert (await backend.find_template("own")).start_command == "/bin/serve 'it now' --fast"
        assert (await backend.find_template("given")).start_command == "sleep 1"
        assert (await backend.find_template("none")).start_command == "x | y"
        assert (await backend.find_template("none")).ready_command == "true"


@pytest.mark.parametrize("network", ["host", "none", "default", "container:other"])
def test_network_that_no_sandbox_can_have_to_itself_is_refused(network):
    with pytest.raises(FailedPrecondition, match=rf"templates\.base\.network.*'{network}'"):
        DockerSettings.read({"templates": {"base": {"image": "some", "network": network}}})


async def test_template_may_name_a_network_of_the_engine(gateway, run):
    """The engine's usual one: sandboxes see each other there, as its documentation says."""
    templates = {"base": {"image": gateway.images.debian(), "network": "bridge"}}
    async with gateway.backend(templates=templates) as backend:
        placement = await gateway.create(backend)
        networks = docker(
            "inspect",
            "-f",
            "{{range $k, $v := .NetworkSettings.Networks}}{{$k}} {{end}}",
            placement.handle["container"],
        )
        assert networks.stdout.split() == ["bridge"]
        assert (await run(placement, "hostname -i"))[1].split() == [await backend.address(placement.handle)]
