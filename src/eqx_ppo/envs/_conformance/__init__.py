"""The test of an environment: what a trial runs, the rules, the advice, and the report."""

from eqx_ppo.envs._conformance._check import EnvReport as EnvReport, check_env as check_env
