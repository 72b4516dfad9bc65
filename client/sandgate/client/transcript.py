"""What a handle has seen of a command: the kept output, the text for callbacks, and the result."""

from __future__ import annotations

from sandgate.client.exceptions import CommandExitException, InvalidArgumentException
from sandgate.client.following import End
from sandgate.client.records import CommandResult, Output, OutputText
from sandgate.client.retained import Decoder, Tail

__all__ = ["Transcript"]


class Transcript:
    """Output of one command as far as it was read, at most ``limit`` bytes of each stream."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise InvalidArgumentException(f"max_output_bytes is a number of bytes, not {limit}")
        self._stdout, self._stderr, self._pty = Tail(limit), Tail(limit), Tail(limit)
        self._out_text, self._err_text = Decoder(), Decoder()

    def add(self, output: Output) -> OutputText | None:
        """Keep a piece; its text, or None if it ended within its first character."""
        if output.stdout is not None:
            self._stdout.add(output.stdout)
            return _text(stdout=self._out_text.feed(output.stdout))
        if output.stderr is not None:
            self._stderr.add(output.stderr)
            return _text(stderr=self._err_text.feed(output.stderr))
        self._pty.add(output.pty or b"")
        return OutputText(pty=output.pty)

    def finish(self) -> list[OutputText]:
        """The text of characters that were never completed."""
        left = _text(stdout=self._out_text.finish()), _text(stderr=self._err_text.finish())
        return [text for text in left if text is not None]

    @property
    def stdout(self) -> str:
        return self._stdout.text()

    @property
    def stderr(self) -> str:
        return self._stderr.text()

    @property
    def stdout_bytes(self) -> bytes:
        return bytes(self._stdout)

    @property
    def stderr_bytes(self) -> bytes:
        return bytes(self._stderr)

    @property
    def pty_bytes(self) -> bytes:
        return bytes(self._pty)

    @property
    def truncated(self) -> bool:
        return self._stdout.truncated or self._stderr.truncated or self._pty.truncated

    def result(self, end: End) -> CommandResult:
        """Raises CommandExitException when the command did not end well."""
        if end.exit_code != 0 or end.error is not None:
            raise CommandExitException(
                stdout=self.stdout,
                stderr=self.stderr,
                exit_code=end.exit_code,
                error=end.error,
                truncated=self.truncated,
            )
        return CommandResult(stdout=self.stdout, stderr=self.stderr, exit_code=0, truncated=self.truncated)


def _text(*, stdout: str | None = None, stderr: str | None = None) -> OutputText | None:
    return OutputText(stdout=stdout, stderr=stderr) if stdout or stderr else None
