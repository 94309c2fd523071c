"""TAPE language models in transformers: `AutoModelForCausalLM.from_pretrained(export)` without `trust_remote_code`.

transformers has no entry points for models, so this package puts names into its tables of models when those modules are
imported. `transformers_tape.pth` imports it at every start of Python; therefore nothing else is imported here before it
is needed, and nothing here may fail. Where .pth files are not read, `import transformers_tape` does the same.
"""

import sys

MODEL_TYPE = "tape"
CONFIG = "TapeConfig"
AUTO_CLASSES = {
    "AutoModel": "TapeModel",
    "AutoModelForCausalLM": "TapeForCausalLM",
    "AutoModelForSequenceClassification": "TapeForSequenceClassification",
}
LORA_TARGETS = [
    "q_proj",
    "v_proj",
    "position.token_mixing",
    "position.x_proj",
    "position.up_proj",
    "position.down_proj",
]
"""What peft trains where a LoraConfig names no target_modules: Llama's, and what moves the positions."""

_MODULE = f"transformers.models.{MODEL_TYPE}"
_FILES = {CONFIG: "configuration_tape", "TapePreTrainedModel": "modeling_tape"}
_FILES.update(dict.fromkeys(AUTO_CLASSES.values(), "modeling_tape"))
__all__ = sorted(_FILES)


def __getattr__(name):
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)


def _add_architectures(transformers):
    # `transformers serve` takes the class from here.
    for name in _FILES:
        transformers._class_to_module.setdefault(name, f"models.{MODEL_TYPE}")


def _add_architectures_again(module):
    # Once imported, this module runs transformers' __init__.py a second time, and that is `transformers` from then on.
    _add_architectures(sys.modules["transformers"])


def _add_configuration(module):
    module.CONFIG_MAPPING_NAMES[MODEL_TYPE] = CONFIG
    # Names for documentation; the first versions want one for each configuration.
    getattr(module, "MODEL_NAMES_MAPPING", {})[MODEL_TYPE] = "TAPE"


def _add_models(module):
    for auto_class, name in AUTO_CLASSES.items():
        _add(getattr(module, auto_class)._model_mapping, name)


def _add_tokenizer(module):
    _add(module.TOKENIZER_MAPPING, "TokenizersBackend")
    module.CONFIG_TO_TYPE[CONFIG] = MODEL_TYPE


def _add(mapping, name):
    mapping._model_mapping[MODEL_TYPE] = name
    mapping._reverse_config_mapping[CONFIG] = MODEL_TYPE


def _carry_code(module):
    # What is saved carries the code, so that it also loads where this package is not installed.
    for auto_class, name in AUTO_CLASSES.items():
        getattr(module, name).register_for_auto_class(auto_class)
    module.TapeConfig.register_for_auto_class()


def _add_lora_targets(module):
    module.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(MODEL_TYPE, LORA_TARGETS)


_AFTER_IMPORT = {
    "transformers": _add_architectures,
    "transformers.processing_utils": _add_architectures_again,
    "transformers.models.auto.configuration_auto": _add_configuration,
    "transformers.models.auto.modeling_auto": _add_models,
    "transformers.models.auto.tokenization_auto": _add_tokenizer,
    f"{__name__}.modeling_tape": _carry_code,
    "peft.utils.constants": _add_lora_targets,
}


def _run(name):
    try:
        _AFTER_IMPORT[name](sys.modules[name])
    except Exception as error:
        import warnings

        warnings.warn(
            f"transformers-tape could not add TAPE models to {name} ({type(error).__name__}: {error}); load them with "
            "trust_remote_code=True, and see whether a newer transformers-tape knows this version",
            RuntimeWarning,
            stacklevel=2,
        )


class _Alias:
    """Loads `transformers.models.tape`, whose attributes are this package's."""

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        module.__getattr__, module.__all__ = __getattr__, __all__


class _Finder:
    """Finds modules as Python does, and adds to the few of `_AFTER_IMPORT` once they have run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == _MODULE:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, _Alias)
        if name not in _AFTER_IMPORT:
            return None
        others = (finder for finder in sys.meta_path if finder is not _Finder and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _run(name)

            spec.loader.exec_module = exec_module
        return spec


# After a reload, two finders would ask each other for ever.
sys.meta_path[:] = [_Finder, *(finder for finder in sys.meta_path if getattr(finder, "__module__", "") != __name__)]
for _name in _AFTER_IMPORT:
    if _name in sys.modules:
        _run(_name)
