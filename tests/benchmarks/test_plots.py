from benchmarks._figures import Figure
from benchmarks._plots import draw
from benchmarks._report import make_report
from benchmarks._settings import Plan
from benchmarks.suites import memory


def figure(quantity: str) -> Figure:
    return Figure(
        suite=memory.SUITE,
        setting="CartpoleBalance mlp 256x20",
        subject="eqx-ppo",
        quantity=quantity,
        unit="bytes",
        better="lower",
        values=(3e6,),
    )


def drawn(folder, *figures):
    report = make_report(list(figures), Plan(), {}, "2026-01-01T00:00:00", "python -m benchmarks")
    return [path.name for path in draw(report, folder, "svg")]


def test_peers_are_drawn(tmp_path):
    assert drawn(tmp_path, figure(memory.PEAK)) == ["memory.svg"]
    assert (tmp_path / "memory.svg").stat().st_size > 1000


def test_without_peers_there_is_no_picture(tmp_path):
    assert drawn(tmp_path, figure(memory.TEMPORARIES)) == []
    assert drawn(tmp_path) == []
