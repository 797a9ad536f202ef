"""Optimizers by name: AdamW, Muon and Adafactor, compared with PyTorch, transformers and optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import _muon

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.layers.matrices import is_orthogonalised
from moe_jax.parallel.choices import OptimizerName
from moe_jax.recipes import FinetuneSettings
from moe_jax.train import make_optimizer
from moe_jax.train.optimizer import RULES, decayed, newton_schulz
from tests.helpers import tiny

torch = pytest.importorskip("torch")


def steps(optimizer, parameters, gradients):
    """The parameters after a step with each of the gradients."""
    state = optimizer.init(parameters)
    for g in gradients:
        updates, state = jax.jit(optimizer.update)(g, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters


def steps_in_torch(optimizer, matrix, gradients):
    """The matrix after a step of a PyTorch optimizer with each of the gradients."""
    parameter = torch.nn.Parameter(torch.tensor(matrix))
    optimizer = optimizer([parameter])
    for g in gradients:
        parameter.grad = torch.tensor(g)
        optimizer.step()
    return parameter.detach().numpy()


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def in_layers(matrix, name="q_proj"):
    """A tree that holds a stack of matrices as a model does."""
    return {"stages": {0: {"self_attn": {name: {"weight": jnp.asarray(matrix)}}}}}


def relative_change(ours, theirs, start):
    """The largest difference of two results, relative to the largest change from the start."""
    return np.abs(ours - theirs).max() / np.abs(theirs - start).max()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_of_a_matrix_is_pytorchs(rng, shape):
    start, *gradients = (normal(rng, *shape) for _ in range(4))
    optimizer = make_optimizer(1e-2, name="muon", weight_decay=0.1, max_grad_norm=None)
    found = steps(optimizer, in_layers(start[None]), [in_layers(g[None]) for g in gradients])
    muon = partial(torch.optim.Muon, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    theirs = steps_in_torch(muon, start, gradients)
    # PyTorch orthogonalises in bf16.
    assert relative_change(jax.tree.leaves(found)[0][0], theirs, start) < 0.03


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_the_iteration_is_optaxs(rng, shape):
    x = normal(rng, 3, *shape)
    theirs = jnp.stack([_muon.orthogonalize_via_newton_schulz(m, jnp.array(_muon._DEFAULT_NS_COEFFS)) for m in x])
    np.testing.assert_allclose(newton_schulz(jnp.asarray(x)), theirs, atol=1e-5)
    assert not newton_schulz(jnp.zeros((2, 3, 4))).any()


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself(rng):
    """An expert's gate and up are two matrices, although they are stored as one."""
    layers, experts, inter, hidden = 2, 3, 6, 8
    gradient = normal(rng, layers, experts, 2 * inter, hidden)
    optimizer = make_optimizer(1.0, name="muon", weight_decay=0.0, max_grad_norm=None)
    tree = {"stages": {0: {"mlp": {"experts": {"gate_up_proj": jnp.asarray(gradient)}}}}}
    found = -jax.tree.leaves(optimizer.update(tree, optimizer.init(tree), tree)[0])[0]
    alone = newton_schulz(jnp.asarray(gradient).reshape(-1, inter, hidden)) * 0.2 * hidden**0.5
    np.testing.assert_allclose(found.reshape(alone.shape), alone, atol=1e-5)
    assert 0.1 < float(jnp.sqrt(jnp.square(found).mean())) < 0.3


def test_matrices_of_layers_are_orthogonalised():
    def names(model):
        found = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {".".join(map(str, path)) for path, p in found if is_orthogonalised(path, p.shape)}

    others = ("embed_tokens", "lm_head", "norm", "router", "bias")

    def adapted():
        model = tiny.deepseek()
        add_lora(model, LoraSettings(rank=2, targets=("attention", "experts", "router", "head")), rngs=nnx.Rngs(0))
        return model

    model, factors = nnx.eval_shape(tiny.deepseek), names(nnx.eval_shape(adapted))
    everything = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert names(model) == {name for name in everything if not any(other in name for other in others)} != set()
    assert {name.split(".")[-2] for name in factors} == {"lora", "gate_up_lora", "down_lora"}
    assert not [name for name in factors if "router" in name or "lm_head" in name]


def test_muon_updates_the_rest_by_adamw(rng):
    shapes = {"embed_tokens": (9, 4), "lm_head": (9, 4), "norm": (4,), "router": (3, 4), "q_proj": (1, 6, 4)}
    tree, gradients = ({name: {"weight": jnp.asarray(normal(rng, *s))} for name, s in shapes.items()} for _ in range(2))
    muon, adamw = (steps(make_optimizer(1e-2, name=name), tree, [gradients]) for name in ("muon", "adamw"))
    equal = {name: bool((muon[name]["weight"] == adamw[name]["weight"]).all()) for name in shapes}
    assert equal == {name: name != "q_proj" for name in shapes}


def test_adafactor_of_a_matrix_is_optaxs_and_transformers(rng):
    """In a stack too, where optax alone would mix the matrices."""
    from transformers.optimization import Adafactor

    start, *gradients = (normal(rng, 2, 24, 40) for _ in range(4))
    optimizer = make_optimizer(1e-2, name="adafactor", weight_decay=0.1, max_grad_norm=None)
    found = jax.tree.leaves(steps(optimizer, in_layers(start), [in_layers(g) for g in gradients]))[0]
    options = dict(min_dim_size_to_factor=1, multiply_by_parameter_scale=False, weight_decay_rate=0.1 * 1e-2)
    transformers = partial(Adafactor, lr=1e-2, weight_decay=0.1, scale_parameter=False, relative_step=False)
    for layer, ours in enumerate(found):
        own = start[layer], [g[layer] for g in gradients]
        assert relative_change(ours, steps(optax.adafactor(1e-2, **options), *own), start[layer]) < 1e-5
        assert relative_change(ours, steps_in_torch(transformers, *own), start[layer]) < 1e-4


def test_adafactor_of_a_vector_is_optaxs(rng):
    start, *gradients = (normal(rng, 30) for _ in range(4))
    tree = {"norm": {"weight": jnp.asarray(start)}}
    ours = steps(make_optimizer(1e-2, name="adafactor", max_grad_norm=None), tree, [{"norm": {"weight": g}} for g in gradients])
    theirs = steps(optax.adafactor(1e-2, multiply_by_parameter_scale=False), start, gradients)
    assert relative_change(ours["norm"]["weight"], theirs, start) < 1e-5


def test_the_state_of_each_optimizer():
    """AdamW's is optax's own, so that checkpoints from before the others existed can be restored."""
    params = nnx.state(tiny.model(), nnx.Param)
    before = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=decayed))
    sizes = {name: sum(x.size for x in jax.tree.leaves(make_optimizer(1e-3, name=name).init(params))) for name in RULES}
    assert jax.tree.structure(make_optimizer(1e-3).init(params)) == jax.tree.structure(before.init(params))
    own = sum(p.size for p in jax.tree.leaves(params))
    assert sizes["adamw"] == 2 * own + 1
    orthogonalised = sum(p.size for path, p in nnx.to_flat_state(params) if is_orthogonalised(path, p.shape))
    assert sizes["muon"] == 2 * own - orthogonalised + 1
    assert sizes["adafactor"] < own / 4


def test_moments_in_bf16(rng):
    params = in_layers(normal(rng, 1, 4, 6)) | {"norm": {"weight": jnp.ones(4)}}
    optimizer = make_optimizer(1e-3, name="muon", moment_dtype=jnp.bfloat16)
    _, state = optimizer.update(params, optimizer.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"bfloat16", "int32"}
    with pytest.raises(ValueError, match="moments in bfloat16 are too coarse for Adafactor"):
        make_optimizer(1e-3, name="adafactor", moment_dtype=jnp.bfloat16)


def test_names():
    assert tuple(RULES) == OptimizerName.__args__
    with pytest.raises(ValueError, match="name='lion' must be one of adamw, muon, adafactor"):
        make_optimizer(1e-3, name="lion")
    files = dict(model="m", data=__file__, output="o")
    with pytest.raises(ValueError, match="optimizer='lion' must be one of adamw, muon, adafactor"):
        FinetuneSettings(**files, optimizer="lion")
    with pytest.raises(ValueError, match="moment_dtype='bfloat16' cannot be used with optimizer='adafactor'"):
        FinetuneSettings(**files, optimizer="adafactor", moment_dtype="bfloat16")
