"""Schemes as values: each is its text, and Rust alone refuses settings."""

import copy
import dataclasses
import inspect
import pickle
import re

import pytest
import weightsync
from ends import LONG, Net, all_ended, meet
from weightsync import Distributed, MultiProcess, NoSync, Rpc, SharedMem
from weightsync._native import scheme_settings
from weightsync.scheme import StoreScheme

TEXTS = {
    "shared-mem": SharedMem(),
    "shared-mem:pull": SharedMem(pull=True),
    "multi-process": MultiProcess(),
    "multi-process:every=4,own-copy": MultiProcess(every=4, own_copy=True),
    "distributed": Distributed(),
    "distributed:listen=127.0.0.1:0,advertise=localhost:0,insecure-plaintext,every=2,own-copy,"
    "share=relay,deltas=never,verify=blake3,arity=2,connections=3": Distributed(
        listen="127.0.0.1:0",
        advertise="localhost:0",
        insecure_plaintext=True,
        every=2,
        own_copy=True,
        share="relay",
        deltas="never",
        verify="blake3",
        arity=2,
        connections=3,
    ),
    "distributed:pull,share=none,deltas=always": Distributed(
        pull=True, share="none", deltas="always"
    ),
    "rpc": Rpc(),
    "rpc:initial=connect,listen=localhost:0,advertise=127.0.0.1:0,insecure-plaintext": Rpc(
        initial="connect",
        listen="localhost:0",
        advertise="127.0.0.1:0",
        insecure_plaintext=True,
    ),
    "none": NoSync(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_scheme_value_is_its_text(text):
    value = TEXTS[text]
    assert str(value) == text
    with weightsync.Sender(Net(), scheme=value) as by_value:
        # Rust has read every setting, and says them in the same order.
        assert by_value.scheme == by_value.init_info.scheme == text
    with weightsync.Sender(Net(), scheme=text) as by_text:
        assert by_text.scheme == text


@pytest.mark.parametrize("kind", [SharedMem, MultiProcess, Distributed, Rpc, StoreScheme, NoSync])
def test_scheme_value_has_every_setting_of_rust(kind):
    fields = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(kind)}
    fields.pop("url", None)
    settings = scheme_settings(kind._name)
    assert [name for name, *_ in settings] == list(fields)
    words = " ".join(inspect.getdoc(kind).replace("``", "`").split())
    for name, takes, about, default in settings:
        usual = fields[name]
        assert (usual is False) if not takes else (default == (usual and str(usual)))
        assert f"{name.replace('-', '_')}: {about}." in words


def test_wrong_setting_is_refused_in_the_words_of_rust():
    for wrong, words in [
        (lambda: MultiProcess(every=0), '"every": expected 1 to 32, got "0"'),
        (lambda: MultiProcess(every=True), '"every": expected 1 to 32, got ""'),
        (lambda: MultiProcess(every=4.0), '"every": expected 1 to 32, got "4.0"'),
        (lambda: SharedMem(pull=0), '"pull": expected no value, true or false, got "0"'),
        (lambda: Distributed(listen="here"), '"listen": expected .* got "here"'),
        (lambda: Distributed(arity=65), '"arity": expected 1 to 64, got "65"'),
        (lambda: Distributed(share="some"), '"share": expected all, relay or none, got "some"'),
        (lambda: Distributed(pull=True, every=2), '"pull": expected not to be set with `every`'),
        (lambda: Rpc(initial="soon"), '"initial": expected connect or send, got "soon"'),
    ]:
        with pytest.raises(weightsync.SettingError, match=words):
            wrong()


def test_value_with_a_comma_sets_nothing_else():
    with pytest.raises(weightsync.SettingError, match='"listen": .*without commas'):
        Distributed(listen="0.0.0.0:7070,insecure-plaintext")


def test_scheme_value_pickles_compares_and_stays():
    value = Distributed(listen="127.0.0.1:0", arity=2)
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert other == value and hash(other) == hash(value)
    assert dataclasses.replace(value, arity=1) == Distributed(listen="127.0.0.1:0") != value
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.arity = 3


def test_cascade_takes_a_scheme_value():
    sender, model = weightsync.Sender(Net(1.0), scheme=SharedMem()), Net()
    sender.connect(0)
    cascade = weightsync.Cascade(sender.init_info, 0, scheme=MultiProcess(every=2), timeout=LONG)
    assert cascade.init_info.scheme == "multi-process:every=2"
    receiver = weightsync.ModelReceiver(cascade.init_info, 0, model=model)
    with all_ended(sender, cascade, receiver):
        meet(cascade, receiver)
        assert model.value == 1.0
