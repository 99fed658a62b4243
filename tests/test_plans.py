"""Plans are the program: their bytes are those of the compiled program's collectives."""

import jax
import pytest
import test_ways
import ways
from jax.sharding import PartitionSpec as P
from workers import auto_mesh

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")

LARGEST_OTHER = 4096
"""Bytes of a collective without a plan: norms, losses, flags."""


def check(found, most_other=LARGEST_OTHER):
    """The program sends what the plans say, and nothing large travels without one."""
    assert found.plans and found.counted
    assert found.agrees, (found.sent_bytes, found.program_bytes)
    large = [x for x in found.others if x.sent_bytes > most_other]
    assert not large, large


NAMES = [name for name in test_ways.COMPRESSED if "auto" not in name]


@pytest.mark.parametrize("text", NAMES)
def test_the_plans_of_a_way_are_its_program(text):
    t = test_ways.Cheap(**vars(test_ways.training(auto_mesh(test_ways.N))))
    way = ways.make_way(text, t)
    split = jax.NamedSharding(way.mesh, P(way.mesh.axis_names))
    tokens = test_ways.batches(t.mesh.size)[0]
    batch = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=split)
    with jax.set_mesh(way.mesh):
        found = dq.explain(jax.jit(way.step), way.like, batch, verbose=False)
    print(text, found)
    check(found)
