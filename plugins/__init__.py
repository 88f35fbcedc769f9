"""The built-in plugins, registered through the same hooks as anyone's."""

from __future__ import annotations

from fedbench.hookspecs import Register, hookimpl


@hookimpl
def fedbench_users(register: Register) -> None:
    register("single", "fedbench_plugins.users.single:SingleTaskUser")


@hookimpl
def fedbench_tasks(register: Register) -> None:
    register("ic10", "fedbench_plugins.tasks.classification:ImageClassification")
    register("ic100", "fedbench_plugins.tasks.classification:ImageClassification")
    register("mlc", "fedbench_plugins.tasks.multi_label:MultiLabelClassification")


@hookimpl
def fedbench_models(register: Register) -> None:
    register("efficientnet-lite0", "fedbench_plugins.models.efficientnet_lite:EfficientNetLite0")
    register("efficientnet-lite1", "fedbench_plugins.models.efficientnet_lite:EfficientNetLite1")
    register("efficientnet-lite2", "fedbench_plugins.models.efficientnet_lite:EfficientNetLite2")
    register("small-convnet", "fedbench_plugins.models.small_convnet:SmallConvNet")
    register("small-resnet", "fedbench_plugins.models.small_convnet:SmallResNet")


@hookimpl
def fedbench_losses(register: Register) -> None:
    register("gramian", "fedbench_plugins.losses.gramian:Gramian")
    register("muscle", "fedbench_plugins.losses.muscle:Muscle")
    register("nt-xent", "fedbench_plugins.losses.nt_xent:NTXent")
    register("pairwise", "fedbench_plugins.losses.pairwise:Pairwise")


@hookimpl
def fedbench_data(register: Register) -> None:
    register("emoji", "fedbench_plugins.data.emoji.world:EmojiWorld")
    register("shapes", "fedbench_plugins.data.shapes:ShapesWorld")


@hookimpl
def fedbench_metrics(register: Register) -> None:
    register("accuracy", "fedbench_plugins.metrics.accuracy:Accuracy")
    register("mean-average-precision", "fedbench_plugins.metrics.mean_average_precision:MeanAveragePrecision")


@hookimpl
def fedbench_engines(register: Register) -> None:
    register("local", "fedbench_plugins.engines.local:LocalEngine")
