"""ExpertsSpec: the experts of a model under one set of names, whatever a config.json calls them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of each sparse layer of a model.

    Code that serves all architectures reads these fields (FLOPs, cost, checks, rebalancing, generation). `ModelConfig.experts`
    returns them.

    Attributes:
      num_experts: routed experts of a layer.
      num_experts_per_tok: experts that the router chooses for each token (k).
      moe_intermediate_size: width of one routed expert's activation.
      shared_intermediate_size: total width of the shared experts, which every token passes; 0 if there are none.
      num_groups: number of equal groups of consecutive experts. The router first chooses groups; 1 if it chooses among all
        experts.
      softmax_router: True if the router chooses the k largest of a softmax over all experts as weights; False: another rule.
      aux_loss_coef: default factor of the load-balancing loss over a whole batch.
      sequence_loss_coef: default factor of the load-balancing loss within each sequence.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    num_groups: int = 1
    softmax_router: bool = True
    aux_loss_coef: float = 0.0
    sequence_loss_coef: float = 0.0
