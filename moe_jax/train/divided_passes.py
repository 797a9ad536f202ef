"""The passes of a pipeline's rank whose backward pass has two halves: b, the gradients of inputs, and W, those of weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from moe_jax.layers.tickets import inputs_backward, weights_backward
from moe_jax.models.forward import Carry
from moe_jax.parallel.pipeline.executor import PipelinePasses, PutOff
from moe_jax.parallel.pipeline.ticks import TickPass
from moe_jax.train.micro_batch import sums_of_loop
from moe_jax.train.pipeline_passes import RankPasses


class Halves(NamedTuple):
    """Passes that fit together: b and whole backward passes read what `forward` saves."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    inputs_backward: Callable[..., Any]
    weights_backward: Callable[..., Any]


@dataclass
class DividedPasses(RankPasses):
    """The passes of a rank, with b and W."""

    def of_pipeline(self) -> PipelinePasses:
        """Returns the passes as the executor of uniform ticks takes them, with W put off."""
        halves = self.halves(divides=True)
        put_off = PutOff(halves.inputs_backward, halves.weights_backward)
        return replace(super().of_pipeline(), forward=halves.forward, backward=halves.backward, put_off=put_off)

    def halves(self, *, divides: bool) -> Halves:
        """Returns the passes; without `divides`, nothing may call b and W.

        Recomputed layers need tickets in b alone. Otherwise what a forward pass saves must be what b needs, and a whole B is b
        and then W.
        """
        micro = replace(self.micro, in_place=self.micro.in_place and not divides)
        apart = replace(self, micro=micro, divided=divides)
        whole = self if self.micro.execution.remat else apart

        def b(*arguments):
            apart.saved_structure = whole.saved_structure
            return apart.inputs_backward(*arguments)

        return Halves(whole.forward, whole.backward, b, apart.weights_backward)

    def backward(self, of_tick: TickPass, saved, dy, totals):
        """Returns a chunk's backward pass, which adds to the sums of gradients."""
        if not self.divided:
            return super().backward(of_tick, saved, dy, totals)
        loop, finish = self.inputs_backward(of_tick, saved, dy, totals)

        def finish_both(run):
            dx, product, totals = finish(run)
            return dx, self.run(self.weights_backward(of_tick, product, totals))[0]

        return loop, finish_both

    def inputs_backward(self, of_tick: TickPass, saved, dy, totals):
        """Returns b of a chunk, which adds the gradients of vectors; its product are the operands of those of matrices."""
        layers, arrays = self._stage_on_device(of_tick, totals.gradients)
        saved = jax.tree.unflatten(self.saved_structure, saved)
        stage = totals.gradients["stages"][self.stage]
        sums, chunk = sums_of_loop(stage, arrays), self._chunk(of_tick)
        loop = inputs_backward(layers, arrays, saved, Carry(dy.x, None), self._droutings(dy), sums, chunk)

        def finish(run):
            changed = nnx.merge_state(stage, run.vectors)
            return type(dy)(run.dx.x, dy.router, dy.counts), run.products, self._with_stage(totals, changed)

        return loop, finish

    def weights_backward(self, of_tick: TickPass, product, totals):
        """Returns W of a chunk, which adds the gradients of matrices."""
        loop = weights_backward(product, totals.gradients["stages"][self.stage], self._chunk(of_tick))
        return loop, partial(self._with_stage, totals)

    def _with_stage(self, totals, stage: nnx.State):
        """Returns the totals with other sums of the gradients of the rank's layers."""
        return totals._replace(gradients=nnx.merge_state(totals.gradients, nnx.State({"stages": {self.stage: stage}})))
