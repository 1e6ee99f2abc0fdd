"""Errors for wrong arguments, for each argument that the library has.

Constructors and functions are found by the ``__all__`` of each public module, so that a new one
cannot be forgotten: ``test_all_that_is_public_is_here`` fails until it stands in a table below.
"""

import contextlib
import importlib
import inspect
import re
import traceback
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale import collectives, ops, recompute
from tfscale.recompute import plan_sqrt
from tfscale.support import arguments

ROOMS = (
    "tfscale", "tfscale.adversarial", "tfscale.callbacks", "tfscale.collectives",
    "tfscale.compression", "tfscale.curvature", "tfscale.extreme", "tfscale.launch", "tfscale.ops",
    "tfscale.optimizers", "tfscale.parallel", "tfscale.plan", "tfscale.quantize",
    "tfscale.recompute", "tfscale.schedules", "tfscale.strategy", "tfscale.sync",
    "tfscale.telemetry",
)  # fmt: skip

WRONG = {
    "None": None, "'x'": "x", "''": "", "[]": [], "{}": {}, "nan": float("nan"),
    "inf": float("inf"), "-inf": float("-inf"), "-5": -5, "0": 0, "1.5": 1.5, "True": True,
    "10**30": 10**30, "1e300": 1e300, "10**5000": 10**5000, "object": object(), "[None]": [None],
    "{1:2}": {1: 2}, "np.nan": np.float32("nan"), "array": np.zeros([2]),
}  # fmt: skip


def model():
    made = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, name="only")])
    made.compile("sgd", "mse")
    return made


def buckets_model(buckets):
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(buckets)])


def many_classes(folder):
    """Return the folder of a trained MACH."""
    made = tfscale.extreme.MACH(buckets_model, 10, 4, 1, folder=folder)
    made.compile()
    made.fit(np.ones([4, 3]), [0, 1, 2, 3], verbose=0)
    return folder


X, Y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments that are right, of what cannot be made before TensorFlow is set up."""
    group = ops.Group.local(["CPU:0"])
    some = model()
    timeline = tmp_path_factory.mktemp("arguments") / "timeline.json"
    timeline.write_text('{"traceEvents": []}')
    step = recompute.trace(some, (tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])))
    saved = timeline.with_name("plan.json")
    plan_sqrt(step).save(saved)
    return {
        "path": saved,
        "model": some,
        "communicator": group.communicators[0],
        "devices": [group.communicators[0].device],
        "step": step,
        "plan": plan_sqrt(step),
        "study": tfscale.quantize.sensitivity(some, X, Y, samples=2, trained=True),
        "files": [timeline],
        "to": timeline,
        "layers": [some.layers[0].name],
        "folder": many_classes(tmp_path_factory.mktemp("mach")),
    }


def _room(found):
    """Return the short name of the package that an object is in."""
    for short, home in tfscale._PACKAGES.items():
        if found.__module__.startswith(f"{home}."):
            return short.split(".")[1]
    return found.__module__.split(".")[1]


def _constructors():
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            found = getattr(module, name)
            if not (inspect.isclass(found) or inspect.isfunction(found)):
                continue
            yield f"{_room(found)}.{name}", found
            for other, value in vars(found).items() if inspect.isclass(found) else ():
                if isinstance(value, classmethod) and other[0] != "_" and other != "from_config":
                    yield f"{_room(found)}.{name}.{other}", getattr(found, other)


CONSTRUCTORS = dict(_constructors())

RECORDS = {
    "what the library makes and hands out": (
        "collectives.Count", "collectives.Kind", "collectives.Move", "collectives.Simulation",
        "compression.Gradient", "compression.Price", "extreme.Plan", "ops.BucketId",
        "ops.Communicator", "ops.Execution", "ops.Taken", "ops.Total", "plan.Cut", "plan.Found",
        "plan.Measured", "plan.Plan", "plan.Point", "plan.Price", "quantize.Exported",
        "quantize.Front", "quantize.Inputs", "quantize.Integers", "quantize.LayerPlan",
        "quantize.LayerStudy",
        "quantize.Net", "quantize.Plan", "quantize.Search", "quantize.Study",
        "recompute.PhasedPlan", "recompute.Plan", "telemetry.Stragglers",
    ),
    "protocols": ("compression.Load", "sync.Round"),
    "errors": (
        "callbacks.Preempted", "collectives.ScheduleError", "curvature.NotFiniteError",
        "cluster.JoinError", "launch.WorkerFailed", "plan.MemoryLimitError",
        "quantize.ExportError", "quantize.InfeasibleError", "quantize.NotExportableError",
        "recompute.BudgetError",
    ),
    "classes to derive from, without arguments": (
        "compression.Method", "compression.Switching", "sync.EveryStep", "sync.Rule",
    ),
    "what reads files; their own tests have the errors": (
        "plan.Cluster.load", "plan.Plan.load", "quantize.Plan.load", "quantize.Study.load",
        "telemetry.stragglers",
    ),
    "reads quantized models; tests/quantize has the errors": ("quantize.integers",),
    "starts servers if it accepts what it is given; see the last test": (
        "ops.Group.cluster", "ops.Group.of_workers",
    ),
}  # fmt: skip

# Keyword arguments that a constructor hands on, and to whom.
HANDS_ON = {
    "schedules.Cosine": "schedules.Schedule",
    "schedules.Drops": "schedules.Schedule",
    "schedules.InverseSquareRoot": "schedules.Schedule",
    "schedules.Polynomial": "schedules.Schedule",
    "curvature.Fisher": "curvature.Hessian",
    "quantize.front": "quantize.plan",
    "strategy.auto_strategy": "strategy.ScaleStrategy",
}
TO_KERAS = (
    "callbacks.Preemption",
    "extreme.HashedFeatures",
    "optimizers.LAMB",
    "optimizers.LARS",
    "optimizers.AdaHessian",
    "parallel.Experts",
)

ATTACK = tfscale.adversarial.FGSM(0.1)
MIXTURE = collectives.mixture("to the next", 1, [])
UNIT = tfscale.plan.Unit("dense", flops=1)
OF_MODEL = {"x": X, "y": Y}
# Arguments with which each constructor works; those that have defaults may be left out.
RIGHT = {
    "strategy.ScaleStrategy": {"devices": ["CPU:0"]},
    "strategy.auto_strategy": {"devices": ["CPU:0"]},
    "parallel.Experts": {"experts": 4, "units": 8},
    "parallel.Grid": {},
    "parallel.Pipeline": {},
    "adversarial.FGSM": {"epsilon": 0.1},
    "adversarial.PGD": {"epsilon": 0.1},
    "adversarial.examples": {"model": None, "x": X, "y": Y, "attack": ATTACK},
    "callbacks.Adversarial": {"attack": ATTACK},
    "callbacks.BatchGrowth": {"sizes": {0: 8}},
    "callbacks.BatchGrowth.by_epochs": {"sizes": {0: 8, 2: 16}, "samples": 40},
    "callbacks.BatchGrowth.by_curvature": {"batch": 2, "largest": 8, "samples": 40, "x": X},
    "callbacks.Curvature": {"x": X},
    "callbacks.Preemption": {"backup_dir": "/tmp/some"},
    "callbacks.Recompute": {"fraction": 0.5},
    "callbacks.Telemetry": {},
    "callbacks.Warmup": {"epochs": 1},
    "collectives.Cluster": {
        "sizes": [2], "inner": collectives.Link(0, 0), "outer": collectives.Link(0, 0)
    },
    "collectives.Cost": {"rounds": 1, "sent": 1, "received": Fraction(1, 2), "seconds": max},
    "collectives.Link": {"alpha": 1, "beta": 1},
    "collectives.Schedule": {"name": "own", "ranks": 1, "chunks": 1, "build": list},
    "collectives.add": {"peer": 1, "chunks": 1},
    "collectives.all_to_all": {"ranks": 2},
    "collectives.all_gather": {"schedule": collectives.ring(2)},
    "collectives.broadcast": {"ranks": 2},
    "collectives.contraction": {"rounds": [MIXTURE]},
    "collectives.finalise": {"chunks": 0},
    "collectives.hierarchical": {"groups": [2, 2]},
    "collectives.is_doubly_stochastic": {"schedule": MIXTURE},
    "collectives.keep": {"peer": 1, "chunks": 1},
    "collectives.matrix": {"schedule": MIXTURE},
    "collectives.mixture": {"name": "own", "ranks": 1, "pairs": []},
    "collectives.mixtures": {"topology": "ring", "ranks": 2},
    "collectives.reduce_scatter": {"schedule": collectives.ring(2)},
    "collectives.resolve": {"algorithm": "ring", "ranks": 2},
    "collectives.send": {"peer": 1, "chunks": 1},
    "collectives.share": {"schedule": MIXTURE, "rank": 0},
    "collectives.simulate": {
        "schedule": collectives.ring(2), "nbytes": 1000, "machine": collectives.Link(1, 1)
    },
    "collectives.transfer": {"ranks": 2, "source": 0, "target": 1},
    **{f"collectives.{n}": {"ranks": 2} for n in ("central", "direct", "halving", "ring", "tree")},
    "compression.Adaptive": {},
    "compression.Kept": {"shape": (1,)},
    "compression.MethodPolicy": {},
    "compression.MethodPolicy.of": {"method": "bf16"},
    "compression.PowerSGD": {},
    "compression.RandomK": {},
    "compression.Settled": {},
    "compression.Staged": {"first": "fp32", "then": "sign"},
    "compression.TopK": {},
    "compression.Wire": {},
    "compression.WirePolicy": {},
    "compression.WirePolicy.of": {"wire": "bf16"},
    "curvature.Fisher": {"model": None, **OF_MODEL},
    "curvature.GaussNewton": {"model": None, **OF_MODEL},
    "curvature.Hessian": {"model": None, **OF_MODEL},
    "cluster.is_first": {},
    "cluster.rank": {},
    "extreme.HashedFeatures": {"units": 4, "buckets": 8},
    "extreme.MACH": {"build": buckets_model, "classes": 100, "buckets": 8, "repetitions": 2},
    "extreme.MACH.load": {"folder": None, "build": buckets_model},
    "extreme.plan": {"classes": 1000, "memory": "1GB", "width": 8},
    "extreme.propensities": {"counts": [1, 2]},
    "extreme.repetitions_needed": {"classes": 1000, "buckets": 8, "confusion": 0.1},
    "launch.LocalWorkers": {"command": ["true"], "count": 1},
    "ops.Flight": {"communicator": None},
    "ops.Group": {"devices": None, "peers": ["me"], "local_ranks": [0]},
    "ops.Group.local": {"devices": ["CPU:0"]},
    "ops.mix": {"x": [1.0], "communicator": None, "schedule": MIXTURE},
    **{
        f"ops.{name}": {"x": [1.0], "communicator": None}
        for name in ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
    },
    "ops.transfer": {"x": [1.0], "communicator": None, "source": 0, "target": 0},
    "optimizers.AdaHessian": {},
    "optimizers.LAMB": {},
    "optimizers.LARS": {},
    "plan.Cluster": {"hosts": [tfscale.plan.Host()]},
    "plan.Cluster.parse": {"text": "(1 device)"},
    "plan.Host": {},
    "plan.Numbers": {},
    "plan.Racks": {"hosts": 2},
    "plan.Unit": {"name": "dense"},
    "plan.best": {"model": [UNIT], "batch": 8, "cluster": "(1 device)"},
    "plan.curve": {
        "units": [UNIT], "batch": 8, "ranks": [1],
        "cluster": tfscale.plan.Cluster([tfscale.plan.Host()]),
    },
    "plan.measured": {"model": None, "batch": 4},
    "plan.read": {"model": None},
    "plan.transformer": {
        "blocks": 1, "hidden": 8, "heads": 2, "sequence": 4, "vocabulary": 10
    },
    "quantize.front": {"study": None, "points": 2},
    "quantize.plan": {"study": None, "size": "25%"},
    "quantize.wires": {"study": None, "budget": "100%"},
    "quantize.sensitivity": {
        "model": None, **OF_MODEL, "by": "error", "trained": True, "bits": (2, 4, 8)
    },
    "recompute.load_plan": {"path": None, "step": None},
    "recompute.plan_budget": {"step": None, "budget": 1e9},
    "recompute.plan_fraction": {"step": None, "fraction": 1.0},
    "recompute.plan_layers": {"step": None, "layers": None},
    "recompute.plan_sqrt": {"step": None},
    "recompute.recomputing": {"model": None, "plan": None},
    "recompute.trace": {
        "model": None, "batch": (tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])),
        "open_batch": (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
    },
    "quantize.RefreshWires": {"x": X, "y": Y, "every": 1},
    "quantize.search": {
        "space": dict.fromkeys("abc", dict.fromkeys((1, 2, 3, 4), 0.25)),
        "score": lambda net, effort: 1.0, "latency": 3.0,
        "share": 1.0, "finalists": 1,
    },
    "quantize.Prune": {"sparsity": 0.5, "end": 4},
    "quantize.apply": {"model": None, "plan": {"only": 8}},
    "quantize.shrink": {"model": None},
    "schedules.Constant": {"rate": 0.1},
    "schedules.Cosine": {"rate": 0.1, "end": 10},
    "schedules.Drops": {"rate": 0.1, "at": [5]},
    "schedules.InverseSquareRoot": {"rate": 0.1, "warmup": 10},
    "schedules.Polynomial": {"rate": 0.1, "end": 10},
    "schedules.Schedule": {"rate": 0.1},
    "schedules.linear_scaling": {"rate": 0.1, "base_batch": 8, "batch": 16},
    "schedules.square_root_scaling": {"rate": 0.1, "base_batch": 8, "batch": 16},
    "sync.BoundedStaleness": {},
    "sync.DiLoCo": {},
    "sync.ElasticAveraging": {},
    "sync.Gossip": {},
    "sync.Hierarchical": {},
    "sync.LocalSGD": {},
    "sync.Period": {"first": 1, "last": 4, "rounds": 2},
    "sync.stable_rate": {"bound": 2},
    "telemetry.merge": {"files": None, "to": None},
}  # fmt: skip


def _table(text):
    """Return a set of labels of WRONG for each constructor and each of its arguments."""
    lines = re.sub(r"\n    ", " ", text).strip().splitlines()
    named = (line.split(": ") for line in lines)
    return {
        name: {k: set(v.split(",")) for k, v in (each.split("=") for each in arguments.split())}
        for name, arguments in named
    }


# Arguments of which a call takes one.
EITHER_OR = {
    "callbacks.Recompute": ("budget", "fraction", "layers", "segments", "plan"),
    "callbacks.Warmup": ("schedule", "epochs", "steps"),
    "quantize.plan": ("size",),  # or bops, or latency
}

# What is said otherwise, on purpose: data whose kind is right and whose shapes Keras refuses,
# files that are not there, and a budget that is none for this model.
SAID_OTHERWISE = _table("""
adversarial.examples: x=array
extreme.MACH.load: folder='x'
curvature.Fisher: x={1:2},array y=None,{1:2},array sample_weight={1:2},array
curvature.GaussNewton: x={1:2},array y=None,{1:2},array sample_weight={1:2},array
curvature.Hessian: x={1:2},array y=None,{1:2},array sample_weight={1:2},array
plan.measured: example={1:2},array
plan.read: example={1:2},array
quantize.apply: x={1:2},array
quantize.sensitivity: x={1:2},array y=None,{1:2},array sample_weight={1:2},array
quantize.wires: budget=1.5
recompute.load_plan: path='x'
recompute.plan_budget: budget=1.5
recompute.trace: batch=np.nan,array
strategy.ScaleStrategy: schedule_file='x'
""")

# Those of WRONG that are right for some argument: so silence is a decision.
ACCEPTED = _table("""
adversarial.FGSM: epsilon=1.5 low=-5,0,1.5 high=-5,0,1.5
adversarial.PGD: epsilon=1.5 step_size=1.5 low=-5,0,1.5 high=-5,0,1.5
callbacks.Adversarial: share=0 strength=0,1.5
callbacks.BatchGrowth.by_curvature: x={1:2},array y={1:2},array sample_weight={1:2},array fall=1.5
    file='x'
callbacks.Curvature: x={1:2},array y={1:2},array sample_weight={1:2},array
    variables='x','' jsonl='x'
    tensorboard='x'
callbacks.Preemption: backup_dir='x' exit_code=0
callbacks.Recompute: budget=1.5 example={1:2},array verbose=0,True plan='x' seconds=1.5
callbacks.Telemetry: jsonl='x' tensorboard='x' timeline='x' baseline=1.5
callbacks.Warmup: epochs=0,1.5 steps=0,1.5 start=0,1.5
collectives.Cost: rounds=0 sent=0,1.5 received=0,1.5
collectives.Link: alpha=0,1.5 beta=0,1.5
collectives.Schedule: name='x'
collectives.add: peer=0 chunks=0
collectives.broadcast: root=0
collectives.finalise: chunks=0
collectives.keep: peer=0 chunks=0
collectives.mixture: name='x' pairs=[]
collectives.mixtures: seed=-5,0
collectives.send: peer=0 chunks=0
collectives.share: rank=0
collectives.simulate: nbytes=0,1.5 gamma=0,1.5
collectives.transfer: source=0 target=0
compression.Kept: shape=[]
compression.MethodPolicy: rules={} small=0 sensitive='x',''
compression.MethodPolicy.of: method={}
compression.PowerSGD: saves=0,1.5
compression.Settled: after=0
compression.Staged: when=0
compression.TopK: momentum=0
compression.Wire: feedback=True
compression.WirePolicy: rules={} small=0 sensitive='x',''
compression.WirePolicy.of: wire={}
curvature.Fisher: seed=0 memory=1.5 progress=True variables=''
curvature.GaussNewton: memory=1.5 progress=True variables=''
curvature.Hessian: memory=1.5 progress=True variables=''
extreme.HashedFeatures: seed=0
extreme.MACH: seed=0 folder='x'
extreme.plan: optimizer_slots=0
extreme.propensities: counts=array a=0,1.5 b=0,1.5
launch.LocalWorkers: environment={}
ops.Group: deadline=1.5 slow_after=0,1.5 host='x',''
ops.Group.local: deadline=1.5 slow_after=0,1.5
ops.all_gather: x=[],array stochastic=True seed=-5,0 piece_bytes=0 name='x'
ops.all_reduce: x=[],nan,inf,-inf,-5,0,1.5,np.nan,array stochastic=True seed=-5,0 piece_bytes=0
    name='x'
ops.all_to_all: x=[],array stochastic=True seed=-5,0 piece_bytes=0 name='x'
ops.broadcast: x=[],nan,inf,-inf,-5,0,1.5,np.nan,array root=0 stochastic=True seed=-5,0
    piece_bytes=0 name='x'
ops.mix: x=[],nan,inf,-inf,1.5,np.nan,array stochastic=True seed=-5,0 piece_bytes=0 name='x'
ops.reduce_scatter: x=[],array stochastic=True seed=-5,0 piece_bytes=0 name='x'
ops.transfer: x=[],nan,inf,-inf,-5,0,1.5,np.nan,array,True source=0 target=0 gradient=True
    stochastic=True seed=-5,0 piece_bytes=0 name='x'
optimizers.AdaHessian: learning_rate=0,1.5 beta_1=0 beta_2=0 epsilon=0,1.5 weight_decay=0,1.5
    hessian_power=0 averaging=None,{} seed=0 exclude_from_weight_decay=None,'x','',[]
optimizers.LAMB: learning_rate=0,1.5 beta_1=0 beta_2=0 epsilon=0,1.5 weight_decay=0,1.5
    trust_bounds=array exclude_from_weight_decay=None,'x','',[]
    exclude_from_adaptation=None,'x','',[]
    fused=True
optimizers.LARS: learning_rate=0,1.5 momentum=0 weight_decay=0,1.5 trust_coefficient=0,1.5
    epsilon=0,1.5 exclude_from_weight_decay=None,'x','',[] exclude_from_adaptation=None,'x','',[]
    fused=True
parallel.Experts: activation=None capacity=1.5 balance=0,1.5
plan.Cluster: gamma=0,1.5 step=0,1.5
plan.Host: memory=1.5 rate=1.5 bus=0,1.5 launch=0,1.5 update=0,1.5
    pack=0,1.5
plan.Numbers: weights=0,1.5 gradients=0,1.5 state=0,1.5
plan.Unit: name='x' parameters=0,1.5 inputs=0,1.5 outputs=0,1.5 flops=0,1.5 backward_flops=0,1.5
    kept=0,1.5 pairs=0 halo=array routed=0,1.5 cuts=[]
plan.best: example={1:2},array
quantize.front: pinned={} ties=[] seconds=1.5
quantize.plan: size=1.5 pinned={} ties=[] seconds=1.5
quantize.RefreshWires: x={1:2},array y={1:2},array budget=1.5
quantize.search: latency=1.5 seed=0
quantize.sensitivity: accuracy=0,1.5 file='x' memory=1.5 progress=True seed=0
recompute.plan_budget: seconds=1.5
recompute.plan_fraction: seconds=1.5
quantize.Prune: begin=0 kernels='x',''
schedules.Constant: rate=1.5 warmup=0,1.5 start=0,1.5
schedules.Cosine: rate=1.5 end=1.5 begin=0,1.5 final=0,1.5 warmup=0,1.5 start=0,1.5
schedules.Drops: rate=1.5 factor=1.5 warmup=0,1.5 start=0,1.5
schedules.InverseSquareRoot: rate=1.5 warmup=1.5 start=0,1.5
schedules.Polynomial: rate=1.5 end=1.5 power=1.5 warmup=0,1.5 start=0,1.5
schedules.Schedule: rate=1.5 warmup=0,1.5 start=0,1.5
schedules.linear_scaling: rate=0,1.5
schedules.square_root_scaling: rate=0,1.5
strategy.ScaleStrategy: wire={} method={} error_feedback=True bucket_bytes=1.5 deadline=1.5
    slow_after=0,1.5 join_timeout=1.5
strategy.auto_strategy: wire={} weights_wire={} method={} error_feedback=True bucket_bytes=1.5
    schedule_file='x' deadline=1.5 slow_after=0,1.5 join_timeout=1.5
sync.BoundedStaleness: bound=0 curvature=1.5
sync.DiLoCo: wire={} method={} error_feedback=True delay=0
sync.Gossip: seed=-5,0
sync.LocalSGD: start=0
sync.stable_rate: bound=0 curvature=1.5
telemetry.merge: files=[] to='x'
""")


def test_all_that_is_public_is_here():
    records = {name for names in RECORDS.values() for name in names}
    assert set(CONSTRUCTORS) == set(RIGHT) | records
    assert not set(RIGHT) & records


def _arguments(name):
    """Each argument, and its default."""
    found = {}
    for each in inspect.signature(CONSTRUCTORS[name]).parameters.values():
        if each.kind != each.VAR_KEYWORD:
            found[each.name] = each.default
        elif name not in TO_KERAS:
            found = {**_arguments(HANDS_ON[name]), **found}
    return found


def _accepted(name, argument, default):
    """Return the wrong values that are right here: a default None, True of a flag, the table's."""
    by_default = set()
    if default is None and argument not in EITHER_OR.get(name, ()):
        by_default = {"None"}
    elif isinstance(default, bool):
        by_default = {"True"}
    return by_default | ACCEPTED.get(name, {}).get(argument, set())


def _call(name, argument, value, right):
    others = EITHER_OR.get(name, ())
    kept = {k: v for k, v in right.items() if argument not in others or k not in others}
    made = CONSTRUCTORS[name](**{**kept, argument: value})
    if isinstance(made, contextlib.AbstractContextManager):
        with made:
            pass


def _shown(value):
    """Return how an error may show a value: all of it, or the part of it that is wrong."""
    parts = list(value) if isinstance(value, (list, np.ndarray)) else []
    parts += [*value, *value.values()] if isinstance(value, dict) else []
    return {arguments.shown(each) for each in (value, *parts)}


def _verdict(name, argument, value, right):
    """Return what is wrong with a constructor's error for a value; None if it accepts the value."""
    try:
        _call(name, argument, value, right)
    except (ValueError, TypeError) as error:
        last, said = traceback.extract_tb(error.__traceback__)[-1], str(error)
        if "/tfscale/" not in last.filename:
            return f"{type(error).__name__} of {last.filename}: {said}"
        if not re.search(rf"\b{argument}\b", said):
            return f"does not name it: {said}"
        return "" if any(one in said for one in _shown(value)) else f"does not show it: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(RIGHT))
def test_wrong_arguments_are_named_and_shown(name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right = {key: given.get(key) if value is None else value for key, value in RIGHT[name].items()}
    CONSTRUCTORS[name](**right)
    found = []
    for argument, default in _arguments(name).items():
        accepted = _accepted(name, argument, default)
        otherwise = SAID_OTHERWISE.get(name, {}).get(argument, ())
        for label, value in WRONG.items():
            verdict = _verdict(name, argument, value, right)
            wanted = "otherwise" if label in otherwise else "" if label not in accepted else None
            if verdict != wanted and not (verdict and wanted):
                found.append(f"{argument}={label}: {'silent' if verdict is None else verdict}")
    assert not found


@pytest.mark.parametrize("name", ["ops.Group.cluster", "ops.Group.of_workers"])
@pytest.mark.parametrize("argument", ["resolver", "deadline", "slow_after", "transport"])
def test_groups_of_several_processes_say_it_before_they_meet(name, argument):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    right = {"resolver": resolver}
    if name == "ops.Group.of_workers":
        right["devices"] = ["device:CPU:0"]
    accepted = {
        "resolver": {"None"} if name == "ops.Group.cluster" else set(),
        "transport": set(),
    }.get(argument, ACCEPTED["ops.Group"].get(argument))
    wrong = {label: value for label, value in WRONG.items() if label not in accepted}
    said = {label: _verdict(name, argument, value, right) for label, value in wrong.items()}
    assert said == dict.fromkeys(wrong, "")


@pytest.mark.parametrize("good", [np.int64(3), np.uint8(3), np.int32(3)])
def test_numpys_whole_numbers_are_numbers(good):
    assert type(arguments.whole(good, "count", 1)) is int


@pytest.mark.parametrize(
    "good", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)]
)
def test_numpys_numbers_are_numbers(good):
    assert arguments.real(good, "share", 0, 1) == 0.5
    assert arguments.flag(np.bool_(True), "progress") is True
    with pytest.raises(ValueError, match="progress is True or False"):
        arguments.flag(np.zeros([2], bool), "progress")


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: arguments.whole(0, "rank", 1), "rank is a whole number, 1 or more; got 0"),
        (lambda: arguments.whole(9, "code", 0, 8), "code is a whole number, from 0 to 8; got 9"),
        (lambda: arguments.whole(2**63, "n"), "at most 9,223,372,036,854,775,807; got 9223"),
        (lambda: arguments.real(1, "beta", 0, below=1), "a number, 0 or more and less than 1; got"),
        (lambda: arguments.real(0, "a", above=0, example="0.1"), "more than 0, such as 0.1; got 0"),
        (lambda: arguments.choice("rong", "way", ("ring", "tree")), "Did you mean 'ring'?"),
        (lambda: arguments.items("x", "names", "a list of names"), "names is a list of names; got"),
    ],
)
def test_what_an_error_says(check, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check()


def test_what_was_received_is_shown_on_one_short_line():
    assert "\n" not in arguments.shown(np.zeros([100, 100]))
    assert len(arguments.shown("x" * 10_000)) < 200
    assert arguments.shown(10**5000) == "<int that cannot be shown>"


def test_devices_of_another_task_are_refused():
    with pytest.raises(ValueError, match="devices is a list of devices of this worker"):
        tfscale.ScaleStrategy(devices=["/job:worker/replica:0/task:7/device:CPU:0"])
    tfscale.ScaleStrategy(devices=["/job:localhost/replica:0/task:0/device:CPU:0"])


def test_an_unknown_argument_of_auto_strategy_is_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wires'"):
        tfscale.auto_strategy(wires="int8")
