"""What passes between the packages: prompts in, episodes and samples out. Needs numpy alone."""

from .episodes import Ctx, Env, Episode, EpisodeResult, FailedAttempt, Group, Outcome, check_reward
from .prompts import Message, Policy, Prompt, Sampling
from .trajectories import UNKNOWN_VERSION, FinishReason, Sample, Trajectory, TrajectoryKind, VersionSpan

__all__ = ["UNKNOWN_VERSION", "FinishReason", "Sample", "Trajectory", "TrajectoryKind", "VersionSpan"]
__all__ += ["Ctx", "Env", "Episode", "EpisodeResult", "FailedAttempt", "Group", "Outcome", "check_reward"]
__all__ += ["Message", "Policy", "Prompt", "Sampling"]
