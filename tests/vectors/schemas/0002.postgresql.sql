CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.api_keys (
    id character varying(16) NOT NULL,
    digest character varying(64) NOT NULL,
    prefix character varying(16) NOT NULL,
    name text NOT NULL,
    owner character varying(64) NOT NULL,
    created_at bigint NOT NULL,
    revoked_at bigint
);
CREATE TABLE public.measurements (
    sandbox_id character varying(64) NOT NULL,
    at bigint NOT NULL,
    samples bytea NOT NULL
);
CREATE TABLE public.meta (
    name character varying(64) NOT NULL,
    value text NOT NULL
);
CREATE TABLE public.sandboxes (
    id character varying(64) NOT NULL,
    owner character varying(64) NOT NULL,
    backend character varying(64) NOT NULL,
    template_id text NOT NULL,
    alias text NOT NULL,
    state character varying(16) NOT NULL,
    revision integer NOT NULL,
    created_at bigint NOT NULL,
    started_at bigint,
    end_at bigint,
    ended_at bigint,
    timeout bigint NOT NULL,
    pause_on_timeout boolean NOT NULL,
    pause_memory boolean NOT NULL,
    auto_resume boolean NOT NULL,
    metadata json NOT NULL,
    envs json NOT NULL,
    resources json NOT NULL,
    allow_internet_access boolean NOT NULL,
    network json,
    secure boolean NOT NULL,
    token_version integer NOT NULL,
    handle json NOT NULL,
    pause_mode character varying(16),
    agent_unresponsive boolean DEFAULT false NOT NULL,
    idempotency_key character varying(255),
    request_digest character varying(64)
);
CREATE TABLE public.transitions (
    sandbox_id character varying(64) NOT NULL,
    revision integer NOT NULL,
    at bigint NOT NULL,
    from_state character varying(16),
    to_state character varying(16) NOT NULL,
    note text NOT NULL
);
INSERT INTO public.alembic_version (version_num) VALUES ('0002');
INSERT INTO public.api_keys (id, digest, prefix, name, owner, created_at, revoked_at) VALUES ('k1', '8b9a845c0344468dfb225b08f15c22dc85a7cc018c315035f7766528d8b7103a', 'e2b_012345', 'first', 'default', 1790000000000000, NULL);
INSERT INTO public.api_keys (id, digest, prefix, name, owner, created_at, revoked_at) VALUES ('k2', '2f82ce18f1ba6303fe1e0a7462a4c0ad4ad3a4c3d1d2dbf1f2a8d0f3f5a0a7b1', 'e2b_bbbbbb', 'old', 'gone', 1790000000000000, 1790000000000001);
INSERT INTO public.measurements (sandbox_id, at, samples) VALUES ('iaaaaaaaaaaaaaaaaaaaa', 1790000000000000, '\x00e025dafe5b0600020000000000000000000000000000200000000000000010000000000000100000000000000020000000000000000040000000000067b9ddfe5b060002000000000000000000294000000020000000000000001000000000000010000000000000002000000000000000004000000000');
INSERT INTO public.measurements (sandbox_id, at, samples) VALUES ('iaaaaaaaaaaaaaaaaaaaa', 1790000120000000, '\x00ee4ce1fe5b0600020000000000000000003940000000200000000000000010000000000000100000000000000020000000000000000040000000000075e0e4fe5b0600020000000000000000c0424000000020000000000000001000000000000010000000000000002000000000000000004000000000');
INSERT INTO public.meta (name, value) VALUES ('seed-fingerprint', 'aa1a209f5db71f2bd276f29350335aa6');
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('iaaaaaaaaaaaaaaaaaaaa', 'default', 'local', 'base', '', 'running', 1, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, false, true, false, '{"a": "\u00e4", "nul": "\u0000", "quote": "it''s \"so\"; -- \\"}', '{"X": "1"}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, true, 1, '{"id": "iaaaaaaaaaaaaaaaaaaaa"}', NULL, false, 'retry-1', 'cfcba7f18247ef1fbd9ea7f14ceb3d9cc70b4f530cdaa3c606eadc3f4d4bac97');
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('ibbbbbbbbbbbbbbbbbbbb', 'lab', 'local', 'base', '', 'running', 1, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, true, true, true, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', false, '{"allow_out": ["a"], "deny_out": [], "allow_public_traffic": null, "mask_request_host": ""}', false, 1, '{"id": "ibbbbbbbbbbbbbbbbbbbb"}', NULL, false, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('icccccccccccccccccccc', 'default', 'local', 'base', '', 'killed', 3, 1790000000000000, 1790000001000000, 1790000300000000, 4900000000000000, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "icccccccccccccccccccc"}', NULL, false, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('idddddddddddddddddddd', 'default', 'local', 'base', '', 'creating', 0, 1790000000000000, NULL, NULL, NULL, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "idddddddddddddddddddd"}', NULL, false, 'retry-2', NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('ieeeeeeeeeeeeeeeeeeee', 'default', 'local', 'base', '', 'killing', 2, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "ieeeeeeeeeeeeeeeeeeee"}', NULL, false, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('iffffffffffffffffffff', 'default', 'local', 'base', '', 'failed', 1, 1790000000000000, NULL, NULL, 4900000000000000, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "iffffffffffffffffffff"}', NULL, false, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('igggggggggggggggggggg', 'default', 'local', 'base', '', 'paused', 3, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, true, 1, '{"id": "igggggggggggggggggggg"}', 'full', false, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('ihhhhhhhhhhhhhhhhhhhh', 'default', 'local', 'base', '', 'paused', 3, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "ihhhhhhhhhhhhhhhhhhhh"}', 'filesystem', true, NULL, NULL);
INSERT INTO public.sandboxes (id, owner, backend, template_id, alias, state, revision, created_at, started_at, end_at, ended_at, timeout, pause_on_timeout, pause_memory, auto_resume, metadata, envs, resources, allow_internet_access, network, secure, token_version, handle, pause_mode, agent_unresponsive, idempotency_key, request_digest) VALUES ('ijjjjjjjjjjjjjjjjjjjj', 'default', 'local', 'base', '', 'pausing', 2, 1790000000000000, 1790000001000000, 4900000000000000, NULL, 300000000, false, true, false, '{}', '{}', '{"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}', true, NULL, false, 1, '{"id": "ijjjjjjjjjjjjjjjjjjjj"}', 'full', false, NULL, NULL);
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('iaaaaaaaaaaaaaaaaaaaa', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('iaaaaaaaaaaaaaaaaaaaa', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ibbbbbbbbbbbbbbbbbbbb', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ibbbbbbbbbbbbbbbbbbbb', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('icccccccccccccccccccc', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('icccccccccccccccccccc', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('idddddddddddddddddddd', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ieeeeeeeeeeeeeeeeeeee', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ieeeeeeeeeeeeeeeeeeee', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('iffffffffffffffffffff', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('iffffffffffffffffffff', 1, 1790000001000000, 'creating', 'failed', 'create failed');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('igggggggggggggggggggg', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('igggggggggggggggggggg', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ihhhhhhhhhhhhhhhhhhhh', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ihhhhhhhhhhhhhhhhhhhh', 1, 1790000001000000, 'creating', 'running', 'ready');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ijjjjjjjjjjjjjjjjjjjj', 0, 1790000000000000, NULL, 'creating', 'create');
INSERT INTO public.transitions (sandbox_id, revision, at, from_state, to_state, note) VALUES ('ijjjjjjjjjjjjjjjjjjjj', 1, 1790000001000000, 'creating', 'running', 'ready');
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT api_keys_digest_key UNIQUE (digest);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT api_keys_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT measurements_pkey PRIMARY KEY (sandbox_id, at);
ALTER TABLE ONLY public.meta
    ADD CONSTRAINT meta_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.sandboxes
    ADD CONSTRAINT sandboxes_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.transitions
    ADD CONSTRAINT transitions_pkey PRIMARY KEY (sandbox_id, revision);
CREATE INDEX sandboxes_by_end ON public.sandboxes USING btree (ended_at);
CREATE UNIQUE INDEX sandboxes_by_idempotency_key ON public.sandboxes USING btree (owner, idempotency_key);
CREATE INDEX sandboxes_by_state ON public.sandboxes USING btree (state);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT measurements_sandbox_id_fkey FOREIGN KEY (sandbox_id) REFERENCES public.sandboxes(id) ON DELETE CASCADE;
ALTER TABLE ONLY public.transitions
    ADD CONSTRAINT transitions_sandbox_id_fkey FOREIGN KEY (sandbox_id) REFERENCES public.sandboxes(id) ON DELETE CASCADE;

