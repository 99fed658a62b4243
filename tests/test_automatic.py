"""What `topology=None` means, and where it counts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import METHODS, assert_same_bits, gradient

import dynamiq_jax as dq
from dynamiq_jax.arguments import resolve
from dynamiq_jax.topologies import across_hosts, automatic, choice, fast_links

RING, BUTTERFLY = dq.Ring(), dq.Butterfly()

SEVERAL_HOSTS = {
    (8,): BUTTERFLY,
    (6,): RING,
    (2,): BUTTERFLY,
    (1,): BUTTERFLY,
    (1, 8): BUTTERFLY,
    (6, 1): RING,
    (1, 1, 3): RING,
    (4, 8): dq.Hierarchical(outer=BUTTERFLY),
    (3, 8): dq.Hierarchical(outer=RING),
    (8, 3): dq.Hierarchical(outer=BUTTERFLY),
    (2, 4, 8): dq.Hierarchical(outer=BUTTERFLY),
    (2, 3, 4): dq.Hierarchical(outer=RING),
    (4, 1, 2): dq.Hierarchical(outer=BUTTERFLY),
}


@pytest.fixture
def several_hosts(monkeypatch):
    monkeypatch.setattr(choice, "in_one_domain", lambda: False)


@pytest.mark.parametrize("sizes", SEVERAL_HOSTS)
def test_between_hosts_axes_decide(several_hosts, sizes):
    assert automatic(sizes).topology == SEVERAL_HOSTS[sizes]


@pytest.mark.parametrize("sizes", SEVERAL_HOSTS)
def test_in_one_domain_everyone_talks_to_everyone(monkeypatch, sizes):
    monkeypatch.setattr(choice, "in_one_domain", lambda: True)
    topology, reason = automatic(sizes)
    assert topology == dq.Direct()
    assert "one process or NVLink domain" in reason


def test_across_hosts_powers_of_two_are_butterflies():
    powers = {n for n in range(1, 70) if across_hosts(n) == BUTTERFLY}
    assert powers == {1, 2, 4, 8, 16, 32, 64}
    assert all(across_hosts(n) == RING for n in set(range(1, 70)) - powers)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((8,), "8 workers on several hosts are a power of two"),
        ((6,), "6 workers on several hosts are no power of two"),
        ((2, 4), "several axes, whose last one has fast links"),
    ],
)
def test_reasons_are_explained(several_hosts, sizes, reason, capsys):
    explanation = dq.explain(np.ones(300_000, np.float32), sizes)
    assert explanation.reason == reason
    assert explanation.topology == repr(automatic(sizes).topology)
    printed = " ".join(capsys.readouterr().out.split())
    for word in reason.split():
        assert word in printed


def test_what_is_passed_is_taken(several_hosts):
    for topology in (dq.Direct(), dq.Ring(streams=1)):
        resolved = resolve(None, topology, (2, 4))
        assert resolved.topology == topology
        assert resolved.reason == "as passed"
        assert resolved.n_workers == 8


def test_halves_take_several_axes_as_one(several_hosts):
    assert resolve(None, None, (2, 4), levels=1).topology == BUTTERFLY
    assert resolve(None, None, (2, 3), levels=1).topology == RING
    assert resolve(None, None, (2, 3)).topology == dq.Hierarchical(outer=BUTTERFLY)


def test_a_hierarchy_without_a_second_level_is_its_outer_topology(several_hosts):
    whole = dq.Hierarchical()
    assert resolve(None, whole, (6, 1)).topology == RING
    assert resolve(None, whole, (6, 2)).topology == dq.Hierarchical(outer=RING)
    assert resolve(None, whole, (2, 2, 2)).topology == dq.Hierarchical(outer=BUTTERFLY)
    inner = dq.Hierarchical(inner=dq.Direct(), outer=RING)
    assert resolve(None, inner, (4, 2)).topology == inner


def test_psum_follows_the_rule(several_hosts):
    x, key = gradient(0, 2, 3000), jax.random.key(0)

    def reduced(topology):
        def one(x):
            return dq.psum(x, "data", method=METHODS["default"], topology=topology, key=key)

        return np.asarray(jax.jit(jax.vmap(one, axis_name="data"))(x))

    assert_same_bits(reduced(None), reduced(BUTTERFLY))
    assert np.any(reduced(None) != reduced(dq.Direct()))


def devices(monkeypatch, *, processes, platform="gpu", domains=(), kind="NVIDIA H200"):
    """JAX as it would be with one device in each of ``domains``; `None` does not know any."""
    found = [SimpleNamespace(platform=platform, device_kind=kind, slice_index=d) for d in domains]
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "devices", lambda: found)


@pytest.mark.parametrize(
    ("processes", "platform", "domains", "expected"),
    [
        (1, "cpu", (None, None), True),
        (1, "gpu", (0, 1), True),
        (2, "gpu", (3, 3, 3), True),
        (2, "cuda", (0, 0), True),
        (2, "gpu", (0, 1), False),
        (2, "gpu", (None, None), False),
        (2, "cpu", (0, 0), False),
    ],
)
def test_one_domain_is_one_process_or_what_gpus_say(
    monkeypatch, processes, platform, domains, expected
):
    devices(monkeypatch, processes=processes, platform=platform, domains=domains)
    assert choice.in_one_domain() == expected


@pytest.mark.parametrize(
    ("kind", "processes", "domains", "expected"),
    [
        ("NVIDIA H200", 1, (0, 0), True),
        ("NVIDIA H200", 2, (0, 1), False),
        ("NVIDIA A100-SXM4-80GB", 1, (0,), True),
        ("NVIDIA H100 80GB HBM3", 2, (5, 5), True),
        ("NVIDIA H100 PCIe", 1, (0,), False),
        ("NVIDIA L40S", 1, (0,), False),
        ("cpu", 1, (None,), False),
    ],
)
def test_fast_links_are_those_of_gpus_built_with_nvlink(
    monkeypatch, kind, processes, domains, expected
):
    devices(monkeypatch, processes=processes, domains=domains, kind=kind)
    assert fast_links() == expected
