"""How fast a training was, in the names of the run record: where its time went, samples and tokens
a second, and what share of the device's peak that is. What is not known of a device is absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.base.timing import PHASES, REPLAY
from tasks.engine.batches.batches import Batches
from tasks.engine.training.loop import Fitted, Tools
from tasks.engine.training.peak_flops import Peak, measured, peak


def rates(
    data: DataFacts, *, work: int, peak_flops_per_s: float | None
) -> Callable[[float], dict[str, float]]:
    """More speeds from the samples a second: tokens, and the model's share of the device's peak.

    work: multiply-adds of a row's forward pass. A training step takes six floating-point operations
    for each: two forwards, and twice that backwards (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B).
    """

    def at(samples_per_s: float) -> dict[str, float]:
        found = {}
        if data.task == "tokens":
            found["speed/tokens_per_s"] = samples_per_s * data.input_shape[0]
        if peak_flops_per_s is not None:
            found["speed/mfu"] = 6 * work * samples_per_s / peak_flops_per_s
        return found

    return at


def peak_of(device: DeviceFacts, precision: str, *, task: str) -> Peak | None:
    """The device's peak: of its data sheet, else measured; on a CPU only where a user asks for the
    share of it that tokens take, since measuring takes up to 0.2 s."""
    known = peak(device, precision)
    if known is not None or (device.kind == "cpu" and task != "tokens"):
        return known
    return measured(torch.device(device.name), precision)


def timings(tools: Tools, fitted: Fitted, *, rows: Batches, replays: int) -> dict[str, float]:
    """The run's time by part, and its mean speed. replays: steps that a graph replayed, whose
    phases cannot be told apart; the waits for data are then theirs, the other phases those of the
    steps taken plainly."""
    spent = tools.watch.seconds
    total_s = tools.watch.total_s()
    phase_s = tools.phases.clock.seconds_per_step()
    replay_s = tools.phases.clock.seconds_per_step(replayed=True)
    known_s = sum(spent[part] for part in ("setup", "first_step", "eval", "log", "checkpoint"))
    known_s += sum(phase_s.values()) * (fitted.steps - 1 - replays)
    known_s += sum(replay_s.values()) * replays
    phase_s |= replay_s
    loop_s = spent["first_step"] + spent["steps"]
    samples_per_s = fitted.rows / loop_s
    found = {
        **{f"time/{p}_ms": 1000 * phase_s[p] for p in (*PHASES, REPLAY) if p in phase_s},
        "time/setup_s": spent["setup"],
        "time/first_step_s": spent["first_step"],
        "time/eval_s": spent["eval"],
        "time/log_s": spent["log"],
        "time/checkpoint_s": spent["checkpoint"],
        "speed/samples_per_s": samples_per_s,
        "speed/steps_per_s": fitted.steps / loop_s,
        **tools.speeds(samples_per_s),
    }
    fast_s = tools.phases.clock.fast_step_s()
    if fast_s is not None:
        found["time/fast_step_ms"] = 1000 * fast_s
    reference_s = tools.phases.clock.reference_s()
    if reference_s is not None:
        found["time/reference_ms"] = 1000 * reference_s
    waited = tools.cores.waited()
    if waited is not None:
        found["time/core_wait_pct"] = waited.others_pct
        found["time/core_wait_own_pct"] = waited.own_pct
    if rows.copy_s is not None:
        found["time/h2d_ms"] = 1000 * rows.copy_s  # beside the steps, so that no phase holds it
    if phase_s:
        # Below 0 where phases of sampled steps, times all steps, come to more than there was.
        found["time/unaccounted_pct"] = 100 * (total_s - known_s) / total_s
    sampled = tools.phases.clock.sampled_steps()
    if sampled is not None:
        found["time/timed_steps"] = float(sampled)
    return found


def peak_tags(peak: Peak | None) -> dict[str, str]:
    """Under the names of the run record."""
    if peak is None:
        return {}
    return {
        "device.peak_tflops": f"{peak.flops_per_s / 1e12:.4g}",
        "device.peak_source": peak.source,
    }
