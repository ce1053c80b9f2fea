"""The test of the contract: what a trial runs, the rules, and the report."""

from eqx_ppo.networks._conformance._check import check_module as check_module
