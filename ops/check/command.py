"""`kvatlas check-engine`: a live engine or a recording against the rules of its version."""

from pathlib import Path

import msgspec

from ops.check.expected import wire_of
from ops.check.live import Target, check_live
from ops.check.observed import Observed
from ops.check.report import Finding, is_fit, lines_of
from ops.check.rules import Seen, check
from ops.replay.capture import Capture, load_capture
from ops.replay.pipeline import InProcess
from ops.replay.recordings import refused, replay, settings_of
from relays.dialects import profile_for
from schemas.errors import ConfigError


async def check_engine(target: Target, seconds: float, record: Path | None, *, as_json: bool) -> int:
    """Check a live engine, print what was found, and return 0 where it is fit, else 1.

    Raises:
        Unavailable: nobody answers at one of the addresses.
        ConfigError: the recording cannot be written.
    """
    findings, listener = await check_live(target, seconds)
    if record is not None:
        unit = listener.pipeline.engine.mirror.profile.unit
        listener.recorder.write(record, target.engine, target.version, target.settings, target.rank, unit)
    return _conclude(findings, as_json=as_json)


async def check_recording(folder: Path, version: str | None, *, as_json: bool) -> int:
    """Check a recording, as the version that it names or another one; return 0 where it is fit, else 1."""
    capture = load_capture(folder)
    if version is not None:
        capture = msgspec.structs.replace(capture, version=version)
    return _conclude(await findings_of(capture), as_json=as_json)


async def findings_of(capture: Capture) -> list[Finding]:
    """Return what the rules find in a recording."""
    if refused(capture) is not None:
        try:
            profile_for(capture.engine, "checked", "checked", capture.version, settings_of(capture))
        except ConfigError as error:
            return [Finding("version", "unfit", str(error))]
    profile = profile_for(capture.engine, "checked", "checked", capture.version, settings_of(capture))
    pipeline = InProcess(profile, capture.rank)
    observed = Observed()
    own = f"pub{capture.rank}"
    for frame in capture.published:
        if frame.source in ("pub", own) and frame.message is not None:
            observed.take(*frame.message)
            await pipeline.take(*frame.message)
    seen = Seen(capture.engine, capture.version, wire_of(capture.engine, capture.version), observed, pipeline.engine)
    # a REQ socket's answers lack the empty first part
    answers = [frame for frame in capture.frames if frame.source.startswith("replay") and frame.parts]
    replayed = [frame for frame in answers if not frame.parts[0]]
    if replayed:
        ends = [frame for frame in replayed if not frame.parts[-1]]
        seen.replay_ended = bool(ends)
        seen.replay_parts.update(len(frame.parts) for frame in replayed if frame.parts[-1])
    return [*check(seen), await _predictions(capture)]


async def _predictions(capture: Capture) -> Finding:
    score = await replay(capture)
    excluded = ", ".join(f"{cause} {count}" for cause, count in sorted(score.excluded.items()))
    text = f"{score.exact} of {score.compared} requests equal to the token" + (f" ({excluded})" if excluded else "")
    if not score.compared:
        return Finding("predictions", "unseen", text)
    if score.exact == score.compared:
        return Finding("predictions", "fit", text)
    if score.marked and not score.under_tokens:
        return Finding("predictions", "note", f"{text}; the others are marked as upper bounds")
    return Finding("predictions", "unfit", f"{text}; {'; '.join(score.misses[:3])}")


def _conclude(findings: list[Finding], *, as_json: bool) -> int:
    fit = is_fit(findings)
    if as_json:
        _print(msgspec.json.encode({"fit": fit, "findings": findings}).decode())
    else:
        for line in lines_of(findings):
            _print(line)
        _print("fit" if fit else "unfit")
    return 0 if fit else 1


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201
