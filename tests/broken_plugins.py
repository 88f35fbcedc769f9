"""Plugins that each break one rule, by kind and by the check that must notice."""

from __future__ import annotations

from textwrap import dedent, indent

METHOD = """
import torch, fedbench
from fedbench import messages, verb

class User(fedbench.UserProgram):
    '''A user.'''
USER

class Server(fedbench.ServerProgram):
    def round(self, r):
SERVER

class Broken(fedbench.Method):
    '''Breaks one rule.'''
    User = User
    Server = Server
METHOD

@fedbench.hookimpl
def fedbench_methods(register):
    register("broken", Broken)
"""

LOSS = """
import time, torch, fedbench

class Broken(fedbench.AlignmentLoss):
    '''Breaks one rule.'''
    def __init__(self) -> None:
        super().__init__()
INIT
    def forward(self, anchor, others):
        cosine = (anchor * others).sum(-1)
        value = (1 - cosine).mean()
FORWARD
        return value

@fedbench.hookimpl
def fedbench_losses(register):
    register("broken", Broken)
"""

DATA = """
import dataclasses, numpy as np, fedbench
from fedbench_plugins.data.shapes import ShapesWorld

class Broken(ShapesWorld):
    '''Breaks one rule.'''
    def __init__(self) -> None:
        super().__init__(pixels=16)
BODY

@fedbench.hookimpl
def fedbench_data(register):
    register("broken", Broken)
"""

MODEL = """
import torch, fedbench
from fedbench_plugins.models.small_convnet import SmallConvNet

class Broken(SmallConvNet):
    '''Breaks one rule.'''
    def __init__(self) -> None:
        super().__init__(width=8)
INIT
    def forward(self, x):
        features = super().forward(x)
FORWARD
        return features

@fedbench.hookimpl
def fedbench_models(register):
    register("broken", Broken)
"""

TASK = """
import torch, fedbench
from torch.nn import functional
from fedbench_plugins.tasks.classification import ImageClassification

class Broken(ImageClassification):
    '''Breaks one rule.'''
    def __init__(self) -> None:
        super().__init__()
BODY

@fedbench.hookimpl
def fedbench_tasks(register):
    register("broken", Broken)
"""

METRIC = """
import numpy as np, fedbench
from fedbench_plugins.metrics.accuracy import Accuracy

class Broken(Accuracy):
    '''Breaks one rule.'''
BODY

@fedbench.hookimpl
def fedbench_metrics(register):
    register("broken", Broken)
"""

ENGINE = """
import fedbench
from fedbench_plugins.engines.local import LocalEngine

class Broken(LocalEngine):
    '''Breaks one rule.'''
BODY

@fedbench.hookimpl
def fedbench_engines(register):
    register("broken", Broken)
"""

USER = """
import torch, fedbench
from fedbench_plugins.users.single import SingleTaskUser

class Broken(SingleTaskUser):
    '''Breaks one rule.'''
    def build(self, spec, **given):
        participant, examiner = super().build(spec, **given)
BODY
        return participant, examiner

@fedbench.hookimpl
def fedbench_users(register):
    register("broken", Broken)
"""

OBSERVER = """
import fedbench

class Broken(fedbench.Observer):
    '''Breaks one rule.'''
    def round_finished(self, cell, record):
        raise RuntimeError("no connection")

@fedbench.hookimpl
def fedbench_observers(register):
    register("broken", Broken)
"""


def filled(template: str, **parts: tuple[int, str]) -> str:
    """A template with each part in its place, indented by as much as stands before it."""
    for name, (depth, text) in parts.items():
        template = template.replace(f"\n{name.upper()}\n", f"\n{indent(dedent(text).strip(), ' ' * depth)}\n", 1)
    return template


def method(user: str = "pass", server: str = "self.ask('fit')", method: str = "pass") -> str:
    """A method file made of what is special about it."""
    return filled(METHOD, user=(4, user), server=(8, server), method=(4, method))


def loss(forward: str = "pass", init: str = "pass") -> str:
    """A loss file: it may change `value`, which is 1 minus the mean cosine."""
    return filled(LOSS, init=(8, init), forward=(8, forward))


def model(forward: str = "pass", init: str = "pass") -> str:
    """A model file: a small convolutional net that may change its `features`."""
    return filled(MODEL, init=(8, init), forward=(8, forward))


def scaled(factor: str) -> str:
    """A user program whose local loss depends on something."""
    return f"def private_loss(self, x, targets):\n    return super().private_loss(x, targets) * ({factor})"


def changed(template: str, body: str, depth: int = 4) -> str:
    """A built-in plugin with methods of its own."""
    return filled(template, body=(depth, body))


METHODS = {
    "two rounds": method(scaled("float('nan')")),
    "heads": method(
        """
        @verb
        def nudge(self):
            with torch.no_grad():
                self.head.weight += 0.01
        """,
        "self.ask('fit')\nself.ask('nudge')",
    ),
    "other users": method(
        """
        everyone = []
        def setup(self):
            if self.name == "user1":
                self.everyone.clear()
            self.everyone.append(self)
        @verb
        def meddle(self):
            with torch.no_grad():
                self.everyone[0].representation.projection.weight.mul_(1.01)
        """,
        "self.ask('fit')\nself.ask('meddle', users=[user for user in self.users if user == 'user2'])",
    ),
    "bytes": method(
        server="""
        self.ask("fit")
        batch, = self.public.draw(1, 4)
        self._federation.engine.ask("represent", {user: messages.encode({"batch": batch}) for user in self.users})
        """
    ),
    "same twice": method(
        """
        count = [0]
        def private_loss(self, x, targets):
            self.count[0] += 1
            return super().private_loss(x, targets) * self.count[0]
        """
    ),
    "untouched users": method(scaled("1.5"), method="def touches(self, users):\n    return [users[0].name]"),
    "another process": method(scaled("1 + hash('fedbench') % 1000")),
    "messages only": method(
        """
        board = {}
        @verb
        def post(self, batch):
            self.board[self.name] = float(self.embed(batch).detach().sum())
        @verb
        def read(self):
            with torch.no_grad():
                self.representation.projection.weight.mul_(1 + 0.01 * self.board["user1"])
        """,
        """
        self.ask("fit")
        batch, = self.public.draw(1, 4)
        self.ask("post", batch=batch)
        self.ask("read")
        """,
    ),
    "resume": method(
        """
        count = 0
        def private_loss(self, x, targets):
            self.count += 1
            return super().private_loss(x, targets) * self.count
        """
    ),
    "held-out data": method(
        """
        seen = 0.0
        def outputs(self, x):
            if not self.representation.training:
                self.seen = float(x.mean())
            return super().outputs(x)
        def private_loss(self, x, targets):
            return super().private_loss(x, targets) * (1 + self.seen)
        def save(self):
            return {"seen": self.seen}
        def restore(self, state):
            self.seen = state["seen"]
        """
    ),
    "failing user": method(
        server="""
        self.ask("fit")
        batch, = self.public.draw(1, 4)
        z = self.ask("represent", batch=batch)
        self.log("mean", {user: float(z[user]["z"].mean()) for user in self.specs})
        """
    ),
}

LOSSES = {
    "scalar": loss("value = value.detach() + others.sum()"),
    "sizes": loss("value = value * (float('nan') if len(anchor) == 64 else 1)"),
    "identical rows": loss("value = value + 0.01 * (anchor - anchor.mean(0)).norm(dim=1).log().mean()"),
    "orthogonal rows": loss("value = value + 0.001 * cosine.abs().log().mean()"),
    "number formats": loss("value = value + (anchor @ torch.eye(anchor.shape[1])).mean()"),
    "order of others": loss("value = value + (torch.arange(len(others)) * cosine.mean(1)).sum()"),
    "inputs": loss("others.mul_(1.0)\nvalue = (1 - (anchor * others).sum(-1)).mean()"),
    "global generators": loss("value = value + 0 * torch.rand(())"),
    "parameters": loss("value = value * self.scale", "self.scale = torch.ones((), requires_grad=True)"),
    "cost": loss("time.sleep(0.2 * (anchor.shape[0] == 32 and len(others) == 3))"),
    "training": loss("self.count += 1\nvalue = value * self.count", "self.count = 0"),
}

WORLDS = {
    "sizes and types": """
        def test(self, task, *, size):
            samples = super().test(task, size=size)
            return dataclasses.replace(samples, scenes=samples.scenes.astype(np.int32))
        """,
    "labels": """
        def test(self, task, *, size):
            samples = super().test(task, size=size)
            return dataclasses.replace(samples, targets=samples.targets + 100)
        """,
    "splits": """
        def test(self, task, *, size):
            return dataclasses.replace(super().test(task, size=size), scenes=self.public(size=size, views=1).scenes)
        """,
    "same twice": """
        def test(self, task, *, size):
            samples = super().test(task, size=size)
            noise = np.random.default_rng().integers(0, 9, samples.inputs["image"].shape, np.uint8)
            return dataclasses.replace(samples, inputs={"image": samples.inputs["image"] ^ noise})
        """,
    "another process": """
        def test(self, task, *, size):
            samples = super().test(task, size=size)
            return dataclasses.replace(samples, key=samples.key + str(hash(task)))
        """,
    "seeds": """
        def train(self, task, *, seed, **options):
            return super().train(task, seed=0, **options)
        """,
    "fixed sets": """
        made = 0
        def train(self, task, **options):
            self.made += 1
            return super().train(task, **options)
        def public(self, *, size, views):
            samples = super().public(size=size, views=views)
            return dataclasses.replace(samples, scenes=samples.scenes + self.made)
        """,
    "attribution": "manifest = 'abc'",
}

MODELS = {
    "features": model(init="self.features += 1"),
    "row by row": model("features = features - features.mean(0)"),
    "same twice": model(
        "features = features + self.shift",
        """
        generator = torch.Generator()
        generator.seed()
        self.shift = torch.nn.Parameter(torch.randn((), generator=generator))
        """,
    ),
    "state": model("features = features + self.shift", "self.shift = torch.randn(())"),
    "gradients": model(init="self.requires_grad_(False)"),
    "training": model(
        """
        if self.training:
            self.count += 1
            features = features * self.count
        """,
        "self.count = 0",
    ),
}

TASKS = {
    "outputs and loss": """
        def loss(self, outputs, targets):
            return functional.cross_entropy(outputs, targets, reduction="none")
        """,
    "one-sided batches": """
        def loss(self, outputs, targets):
            others = torch.tensor(float(len(targets.unique()) - 1))
            return super().loss(outputs, targets) / (1 if len(targets) == 1 else others)
        """,
    "scores": """
        def scores(self, outputs):
            return super().scores(outputs).astype("float32")
        """,
    "direction": """
        def loss(self, outputs, targets):
            return -super().loss(outputs, targets)
        """,
    "training": """
        count = 0
        def loss(self, outputs, targets):
            self.count += 1
            return super().loss(outputs, targets) * (1 + 0.001 * self.count)
        """,
}

METRICS = {
    "value": """
        def __call__(self, scores, targets):
            return 2 * super().__call__(scores, targets)
        """,
    "direction": "higher_is_better = False",
    "inputs": """
        def __call__(self, scores, targets):
            scores += 1
            return super().__call__(scores, targets)
        """,
    "order of items": """
        def __call__(self, scores, targets):
            return super().__call__(scores[:20], targets[:20])
        """,
    "no number": """
        def __call__(self, scores, targets):
            return super().__call__(np.nan_to_num(scores), targets)
        """,
}

ENGINES = {
    "messages": """
        def ask(self, verb, messages, *, timeout=None):
            return dict(reversed(super().ask(verb, messages).items()))
        """,
    "faults": """
        def _call(self, user, verb, message):
            return self._users[user].call(verb, message)
        """,
    "same numbers": """
        def _call(self, user, verb, message):
            if verb == "fit":
                super()._call(user, verb, message)
            return super()._call(user, verb, message)
        """,
}

USERS = {
    "parts": "examiner.test = examiner.validation",
    "initial weights": "participant.head.weight.data += torch.rand(())",
    "training": """
        class Counting(type(participant.task)):
            count = 0
            def loss(self, outputs, targets):
                self.count += 1
                return super().loss(outputs, targets) * self.count
        participant.task = Counting()
        """,
}

BROKEN: dict[tuple[str, str], str] = {
    **{("method", check): text for check, text in METHODS.items()},
    **{("loss", check): text for check, text in LOSSES.items()},
    **{("data", check): changed(DATA, body) for check, body in WORLDS.items()},
    **{("model", check): text for check, text in MODELS.items()},
    **{("task", check): changed(TASK, body) for check, body in TASKS.items()},
    **{("metric", check): changed(METRIC, body) for check, body in METRICS.items()},
    **{("engine", check): changed(ENGINE, body) for check, body in ENGINES.items()},
    **{("user", check): changed(USER, body, depth=8) for check, body in USERS.items()},
    ("observer", "changes nothing"): OBSERVER,
}
"""By kind and check: a plugin file whose `broken` fails exactly this check."""
