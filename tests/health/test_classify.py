from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.agent.health import classify as classifier
from regrow.agent.health import xid
from regrow.agent.health.needles import Gated

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    """Rows of a tab-separated table in tests/health/data."""
    with (DATA / name).open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


LISTED = rows("loglines.tsv")
OWN = rows("own_lines.tsv")
HELD_OUT = rows("heldout.tsv")


@pytest.mark.parametrize("row", LISTED, ids=[row["id"] for row in LISTED])
def test_listed_lines(row: dict[str, str]) -> None:
    got = classifier.classify(row["line"])
    assert (got.kind, got.action, got.role) == (row["class"], row["action"], row["role"])


@pytest.mark.parametrize("row", OWN, ids=[f"{row['class']}-{number}" for number, row in enumerate(OWN)])
def test_other_formats_of_the_same_kinds(row: dict[str, str]) -> None:
    assert classifier.classify(row["line"]).kind == row["class"]


@pytest.mark.parametrize("row", HELD_OUT, ids=[f"{row['class']}-{number}" for number, row in enumerate(HELD_OUT)])
def test_lines_that_were_written_before_the_rules_for_them(row: dict[str, str]) -> None:
    """NCCL, Xid, SXid, OOM killer, MCE, EDAC, mlx5, Lustre, GPFS, NFS, Slurm, torchrun, hung tasks, and look-alikes; docs/health.md
    has what was right at the first look."""
    assert classifier.classify(row["line"]).kind == row["class"]


@pytest.mark.parametrize(
    "row", [row for row in LISTED if "kernel" in row["source"] and row["line"].startswith("[")], ids=lambda row: row["id"]
)
@pytest.mark.parametrize(
    "prefix",
    ["", "Nov 28 04:40:51 gpu-07 kernel: ", "2026-11-28T04:40:51.123456+00:00 gpu-07 kernel: ", "<3>", "[Sat Nov 28 04:40:51 2026] "],
)
def test_kernel_lines_under_any_prefix(row: dict[str, str], prefix: str) -> None:
    text = row["line"].split("] ", 1)[1]
    assert classifier.classify(prefix + text).kind == row["class"]


@given(st.binary(max_size=600))
@settings(max_examples=150, deadline=None)
def test_total_on_any_bytes(data: bytes) -> None:
    lines = classifier.classify_lines(data.decode(errors="replace").split("\n"))
    verdict = classifier.verdict(lines)
    assert [one.line for one in lines] == list(range(1, len(lines) + 1))
    assert {one.kind for one in lines} <= classifier.classes()
    assert verdict.first_line <= len(lines)


@given(st.text(alphabet=st.sampled_from("NVRM: Xid(PC0123456789abf.)errolsn,-;|[]= "), max_size=200))
@settings(max_examples=150, deadline=None)
def test_total_on_near_misses(text: str) -> None:
    assert classifier.classify(text).kind in classifier.classes()


def test_every_xid_of_the_facts_is_in_the_table() -> None:
    for row in rows("xid.tsv"):
        known = xid.table()[int(row["xid"])]
        assert known.vendor == row["vendor_immediate_and_investigate"]
        assert known.advice == row["proposed_class"]
        assert known.action in xid.ACTIONS


def test_xid_number_is_read_from_the_code_field_not_the_address() -> None:
    got = classifier.classify("NVRM: Xid (PCI:0000:79:00): 31, pid=48, name=python3, Ch 00000074")
    assert got.xid == 31


def test_needles_never_rule_a_match_out() -> None:
    """The gate is an optimisation: with and without it every line of the tables gets the same class."""
    for row in [*LISTED, *OWN]:
        line = row["line"]
        for rule in classifier._rules():
            for gated in rule.any:
                assert gated.found(line, line.lower()) == (gated._regex.search(line) is not None)


def test_needles_of_alternatives() -> None:
    gated = Gated(r"(foo|bar\d+) then (?:baz)?")
    assert gated.needles == ((" then ",), ("bar", "foo"))
    assert gated.found("Bar7 THEN ", "bar7 then ")
    assert not gated.found("Bar THEN ", "bar then ")


def _verdict(*lines: str) -> tuple[str, str, int]:
    got = classifier.verdict(classifier.classify_lines(lines))
    return got.kind, got.action, got.first_line


def _line(name: str) -> str:
    return next(row["line"] for row in LISTED if row["id"] == name)


class TestVerdict:
    def test_nothing(self) -> None:
        assert _verdict("Saved checkpoint", "") == ("benign", "none", 0)

    def test_the_first_cause_not_the_loudest(self) -> None:
        loud = [_line("L061")] * 50 + [_line("L063")] * 50
        assert _verdict(*loud[:3], _line("L006"), _line("L005"), *loud, _line("L079")) == ("gpu_mem_uncorrectable", "drain_reset_gpu", 4)

    def test_kernel_time_orders_lines_that_were_written_late(self) -> None:
        assert _verdict(_line("L005"), _line("L008"), _line("L006"))[0] == "gpu_mem_uncorrectable"

    def test_the_traceback_is_the_cause_of_the_resets_around_it(self) -> None:
        assert _verdict(_line("L065"), _line("L063"), _line("L076"), _line("L079")) == ("user_code", "fix_code", 3)

    def test_a_broken_part_outranks_the_program_errors_it_leads_to(self) -> None:
        lines = ("NVRM: Xid (PCI:0000:1b:00): 31, pid=1, MMU Fault",) * 2 + (_line("L013"), _line("L005"))
        assert _verdict(*lines) == ("gpu_firmware", "reset_gpu", 3)

    def test_corrected_errors_are_no_cause_while_there_is_another(self) -> None:
        assert _verdict(_line("L041"), _line("L035"), _line("L042")) == ("host_dimm_uncorrected", "replace_node", 3)
        assert _verdict(_line("L041")) == ("host_dimm_corrected", "watch", 1)

    def test_only_symptoms_is_unknown(self) -> None:
        assert _verdict(_line("L061"), _line("L063")) == ("unknown", "symptom_find_straggler", 1)

    def test_preemption_explains_what_follows(self) -> None:
        assert _verdict(_line("L080"), _line("L079"), _line("L065")) == ("preempted", "resume_later", 1)

    def test_bus_error_then_lost_gpu(self) -> None:
        assert _verdict(_line("L033"), _line("L017"), _line("L019"), _line("L005"))[:2] == ("pcie_uncorrected", "reboot_node")
