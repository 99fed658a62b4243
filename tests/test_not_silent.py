"""Programs that would do something else than their authors expect say so while they are traced."""

import contextlib
import inspect
import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import CHEAP
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.core import compat

N = 4
LARGE = jax.ShapeDtypeStruct((300, 300), jnp.float32)
SMALL = jax.ShapeDtypeStruct((300,), jnp.float32)


def traced(function, *args, in_specs=None, check_vma=True, n=N):
    """Traces under `jax.shard_map`, and computes nothing."""
    options = {"in_specs": in_specs or P(), "out_specs": P("data"), "check_vma": check_vma}
    return jax.eval_shape(jax.shard_map(function, mesh=auto_mesh(n), **options), *args)


def as_varying(tree):
    return jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), tree)


class TestLeavesThatAreEqualEverywhere:
    """Large ones are mostly gradients of replicated parameters, summed already."""

    @pytest.mark.parametrize("way", ["pmean", "reduce", "in a chain"])
    def test_their_mean_warns_and_names_leaf_and_remedy(self, way):
        def run(tree):
            if way == "in a chain":
                rule = dynamiq_jax.optax.all_reduce("data", compression=CHEAP)
                return as_varying(rule.update(tree, rule.init(tree))[0])
            found = getattr(dq, way)(tree, "data", compression=CHEAP)
            return as_varying(found if way == "pmean" else found.tree)

        leaf = r"leaf \['w'\] \(float32\[300, 300\]\) and 0 more"
        with pytest.warns(UserWarning, match=leaf) as w:
            traced(run, {"b": SMALL, "w": LARGE})
        assert w[0].filename == __file__  # the user's line
        told = str(w[0].message)
        assert "4 times the mean" in told and "dq.value_and_grad" in told and "pcast" in told

    def test_small_ones_and_one_worker_do_not(self):
        run = partial(dq.pmean, axis_name="data", compression=CHEAP)
        traced(lambda x: as_varying(run(x)), SMALL)
        traced(lambda x: as_varying(run(x)), LARGE, n=1)


class TestLargeLeavesThatTravelNatively:
    """`explain`, the warning and the program agree."""

    @staticmethod
    def run(method):
        traced(lambda x: dq.pmean(as_varying(x), "data", compression=method), {"w": LARGE})
        return dq.explain({"w": LARGE}, N, compression=method, verbose=False).rows[0].route

    def test_a_limit_that_nobody_set_warns(self):
        with pytest.warns(
            UserWarning, match=r"'w'.*90000 coordinates < min_bucket_size 131072.*min_bucket_b"
        ):
            assert "min_bucket_size 131072" in self.run(dq.DynamiQ())

    def test_a_small_model_of_which_nothing_is_compressed_warns_once(self):
        leaf = jax.ShapeDtypeStruct((40_000,), jnp.float32)
        words = r"'a'.*1 more \(320,000 bytes\).*; nothing is compressed"
        with pytest.warns(UserWarning, match=words) as warned:
            traced(lambda x: dq.pmean(as_varying(x), "data"), {"a": leaf, "b": leaf, "c": SMALL})
        assert len(warned) == 1
        traced(lambda x: dq.pmean(as_varying(x), "data"), {"a": leaf, "loss": SMALL})

    def test_sharded_updates_name_leaves_as_the_users_tree_does(self):
        def run(params):
            optimizer = dq.optax.sharded(optax.sgd(1.0), "data")
            return optimizer.update(as_varying(params), optimizer.init(params), params)[0]

        tree = {"layers": [jax.ShapeDtypeStruct((N, 22_500), jnp.float32)]}
        with pytest.warns(UserWarning, match="a bucket of") as warned:
            traced(run, tree)
        names = [str(x.message).partition(" (")[0] for x in warned]
        assert names == ["leaf ['layers'][0]"] * 2  # scattered, and gathered

    def test_within_error_feedback_too(self):
        method = dq.ErrorFeedback(dq.DynamiQ())
        state = jax.eval_shape(lambda: as_compression(method).init_state({"w": LARGE}, N))

        def run(x, state):
            return dq.reduce(as_varying(x), "data", compression=method, state=state).tree

        with pytest.warns(UserWarning, match="min_bucket_size 131072"):
            traced(run, {"w": LARGE}, state)

    @pytest.mark.parametrize("limit", [{"min_bucket_size": 10**6}, {"min_bucket_bytes": 10**7}])
    def test_a_limit_that_somebody_set_does_not(self, limit):
        assert "min_bucket" in self.run(dq.Compression(**limit))

    def test_zero_bytes_compress_however_small(self):
        assert self.run(dq.Compression(min_bucket_bytes=0)) == "compressed"

    def test_a_tenth_of_the_tree_does_not(self):
        tree = {"w": jax.ShapeDtypeStruct((1500, 1500), jnp.float32)}
        tree["b"] = jax.ShapeDtypeStruct((300, 300), jnp.bfloat16)
        traced(lambda x: dq.pmean(as_varying(x), "data"), tree)


class TestKeysThatDiffer:
    """Workers would round differently, and with dither decode differently."""

    KEY = jax.random.key(3)

    @pytest.mark.parametrize("collective", [dq.psum, dq.psum_scatter, dq.all_gather, dq.fsdp])
    def test_are_refused_by_their_type(self, collective):
        def run(x):
            key = jax.random.fold_in(self.KEY, jax.lax.axis_index("data"))
            x = x if collective is dq.fsdp else as_varying(x)
            return collective(x, "data", compression=CHEAP, key=key)

        with pytest.raises(ValueError, match="key varies over axis 'data'.*in_specs=P()"):
            traced(run, jax.ShapeDtypeStruct((N, 40000), jnp.float32))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_may_differ_over_another_axis(self, check_vma):
        def run(x):
            key = jax.random.fold_in(self.KEY, jax.lax.axis_index("model"))
            return dq.psum(x, "data", compression=CHEAP, key=key)

        options = {"in_specs": P("data", "model"), "out_specs": P(None, "model")}
        mapped = jax.shard_map(run, mesh=mesh_of(N, 2), check_vma=check_vma, **options)
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((N, 80000), jnp.float32))


def renamed(code, **names):
    """Code with other names of its file or functions, those of inner functions included."""
    own = {name: change(getattr(code, name)) for name, change in names.items()}
    constants = (renamed(x, **names) if inspect.iscode(x) else x for x in code.co_consts)
    return code.replace(co_consts=tuple(constants), **own)


def another_jax(monkeypatch, **names):
    """JAX's functions that map have other names than in the versions that the library knows."""
    module = sys.modules[inspect.unwrap(jax.shard_map).__module__]
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    methods = [x for kind in own if inspect.isclass(kind) for x in vars(kind).values()]
    for function in filter(inspect.isfunction, own + methods):
        monkeypatch.setattr(function, "__code__", renamed(function.__code__, **names))


class Unnoticed:
    """A context that JAX's caches of traces do not know."""

    value = 0

    def __call__(self, number):
        return contextlib.nullcontext()


class TestAnotherVersionOfJax:
    """The library's knowledge of JAX's private parts is tried before it is used."""

    def gradient_from_outside(self):
        """It would be half of what it should be."""

        def own(w, x):
            w = dq.fsdp(w, "data", compression=CHEAP)
            return jax.lax.pmean(jnp.mean(w * x[0]), "data")

        options = {"in_specs": (P(), P("data")), "out_specs": P()}
        loss = jax.shard_map(own, mesh=auto_mesh(2), **options)
        jax.eval_shape(jax.grad(loss), SMALL, jax.ShapeDtypeStruct((2, 1), jnp.float32))

    def test_whose_file_of_maps_has_another_name(self, monkeypatch):
        with pytest.raises(ValueError, match="outside of jax.shard_map"):
            self.gradient_from_outside()
        another_jax(monkeypatch, co_filename=lambda name: name.replace("shard_map", "mapping"))
        both = rf"{jax.__version__} differs.*{compat.KNOWN_VERSIONS}"
        with pytest.raises(RuntimeError, match=both):
            self.gradient_from_outside()
        found = inspect.unwrap(jax.shard_map).__code__.co_filename  # as it is imported later
        monkeypatch.setattr(compat, "_FILE_OF_MAPS", found)
        with pytest.raises(ValueError, match="outside of jax.shard_map"):
            self.gradient_from_outside()

    def test_whose_functions_have_other_names(self, monkeypatch):
        assert compat._knows_maps()
        another_jax(monkeypatch, co_name=lambda name: name.replace("trans", "back"))
        assert not compat._knows_maps()

    @pytest.mark.parametrize("example", [lambda: False, lambda: 1 / 0], ids=["other", "raises"])
    def test_of_which_an_example_differs(self, example):
        checked = compat.tried("its parts", example)(lambda: 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in its parts; install one of these"):
                checked()

    def test_of_which_other_examples_differ(self, monkeypatch):
        monkeypatch.setattr(compat.partial_eval, "JaxprTracer", int)
        assert not compat._knows_linear_transpose()
        monkeypatch.setattr(jax.lax, "axis_index", lambda name: jnp.int32(0))
        assert not compat._knows_vmap()
        monkeypatch.setattr(compat, "name_of", lambda one: f"node[{one.primitive.name}]")
        assert not compat._knows_vjp()
        monkeypatch.setattr(compat, "trace_number", Unnoticed())
        assert not compat._knows_contexts()

    def test_that_lacks_a_private_part(self, monkeypatch):
        with pytest.raises(RuntimeError, match="the linear program of jax.vjp"):
            compat.linear_program(lambda x: x)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        with pytest.raises(RuntimeError, match="and has no client"):
            compat.coordination_client()
