"""Evaluation of versions of the weights: on the rollout engines, on engines of its own, or by code of the user's.

    step ─▶ evaluator.Evaluator.begin ─▶ … ─▶ points.EvalLog ─▶ ledger, log, metrics of that step

Whatever goes wrong is a skipped point with its reason: no exception in the loop, and never a score of 0. Import the
module that you need: the configuration is read here by commands that start nothing.
"""
