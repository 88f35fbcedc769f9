"""The usual user: one task, one model, one private data set."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fedbench.cache import Cache
from fedbench.examiner import Examiner
from fedbench.inputs import Inputs
from fedbench.interfaces import Protocol, UserSpec, World
from fedbench.registry import Registry
from fedbench.seeds import derive
from fedbench.user import Participant, Representation


class SingleTaskUser:
    """A user with one task: a backbone and projection of its own, and one head."""

    revision: ClassVar[int] = 1

    def build(
        self,
        spec: UserSpec,
        *,
        world: World,
        registry: Registry,
        protocol: Protocol,
        sizes: dict[str, int],
        seed: int,
        cache: Cache,
        device: torch.device,
    ) -> tuple[Participant, Examiner]:
        """Make the user's parts, and who scores it; initial weights depend on the seed and the user's name alone.

        Args:
            sizes: `validation`, `test` and `public` rows, `train views` and `public views` of an item.
        """
        task = registry.create("task", spec.task)
        train = world.train(
            spec.task, size=spec.train, seed=seed, user=spec.name, views=sizes["train views"], **dict(spec.data)
        )
        validation = world.validation(spec.task, size=sizes["validation"], seed=seed, user=spec.name)
        test = world.test(spec.task, size=sizes["test"])
        public = world.public(size=sizes["public"], views=sizes["public views"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive("initial weights", seed, spec.name))
            backbone: Any = registry.create("model", spec.model, spec.model_options)
            representation = Representation(backbone, protocol.dimension, protocol.projection)
            width = protocol.dimension if protocol.head == "embedding" else representation.features
            head = task.head(width, len(train.classes))
        participant = Participant(
            spec=spec,
            task=task,
            representation=representation.to(device),
            head=head.to(device),
            train=Inputs(train, backbone, cache, device),
            public=Inputs(public, backbone, cache, device),
            device=device,
        )
        examiner = Examiner(
            metric=registry.create("metric", task.metric),
            validation=Inputs(validation, backbone, cache, device),
            test=Inputs(test, backbone, cache, device),
            known=train.pairs,
        )
        return participant, examiner
