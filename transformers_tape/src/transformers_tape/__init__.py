"""TAPE language models in transformers: `AutoModelForCausalLM.from_pretrained(export)` without
`trust_remote_code`.

transformers has no entry points for models, so this package adds entries to its model registries
when their modules are imported. `transformers_tape.pth` imports this package at every start of
Python, so this module must not fail, and must not import transformers or torch itself. If .pth
files are disabled, use `import transformers_tape`.
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
"""Default `target_modules` of peft's LoraConfig for TAPE models: those of Llama, and TAPE's
matrices.
"""

_MODULE = f"transformers.models.{MODEL_TYPE}"
"""The module from which transformers imports the classes of this model type."""
# By class: the module of this package that defines it.
_FILE_OF_NAME = {CONFIG: "configuration_tape", "TapePreTrainedModel": "modeling_tape"}
_FILE_OF_NAME.update(dict.fromkeys(AUTO_CLASSES.values(), "modeling_tape"))
__all__ = sorted(_FILE_OF_NAME)


def __getattr__(name):
    """Return a model or configuration class, whose file is imported on first use."""
    if name not in _FILE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FILE_OF_NAME[name]}"), name)


def _add_architectures(transformers):
    """Add the classes of TAPE models to transformers' lazy module."""
    # `transformers serve` looks up architectures in this dictionary.
    for name in _FILE_OF_NAME:
        transformers._class_to_module.setdefault(name, f"models.{MODEL_TYPE}")


def _add_architectures_again(module):
    """Repeat `_add_architectures` after the import of transformers.processing_utils."""
    # transformers.processing_utils executes transformers' __init__.py again and replaces the module
    # by the result.
    _add_architectures(sys.modules["transformers"])


def _add_configuration(module):
    """Add TapeConfig to the classes that AutoConfig knows."""
    module.CONFIG_MAPPING_NAMES[MODEL_TYPE] = CONFIG
    # Names for documentation. Early versions of transformers require one for each configuration;
    # later versions do not have the mapping.
    getattr(module, "MODEL_NAMES_MAPPING", {})[MODEL_TYPE] = "TAPE"


def _add_models(module):
    """Add the TAPE models to the auto classes."""
    for auto_class, name in AUTO_CLASSES.items():
        _register(getattr(module, auto_class)._model_mapping, name)


def _add_tokenizer(module):
    """Let AutoTokenizer load the tokenizer.json of TAPE models unchanged."""
    _register(module.TOKENIZER_MAPPING, "TokenizersBackend")
    module.CONFIG_TO_TYPE[CONFIG] = MODEL_TYPE


def _register(mapping, name):
    """Add the class `name` for TapeConfig to one of transformers' lazy mappings from configuration
    classes.
    """
    mapping._model_mapping[MODEL_TYPE] = name
    mapping._reverse_config_mapping[CONFIG] = MODEL_TYPE


def _save_code_with_models(module):
    """Make `save_pretrained` copy the modeling code, so that saved models also load without this
    package.
    """
    for auto_class, name in AUTO_CLASSES.items():
        getattr(module, name).register_for_auto_class(auto_class)
    module.TapeConfig.register_for_auto_class()


def _add_lora_targets(module):
    """Set the default `target_modules` of peft's LoraConfig for TAPE models."""
    module.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(MODEL_TYPE, LORA_TARGETS)


# By module: the function to call with it after its import.
_AFTER_IMPORT = {
    "transformers": _add_architectures,
    "transformers.processing_utils": _add_architectures_again,
    "transformers.models.auto.configuration_auto": _add_configuration,
    "transformers.models.auto.modeling_auto": _add_models,
    "transformers.models.auto.tokenization_auto": _add_tokenizer,
    f"{__name__}.modeling_tape": _save_code_with_models,
    "peft.utils.constants": _add_lora_targets,
}


def _run_after_import(name):
    """Call the function of `_AFTER_IMPORT` for the imported module `name`."""
    try:
        _AFTER_IMPORT[name](sys.modules[name])
    except Exception as error:  # an import of transformers must not fail because of this package
        import warnings

        warnings.warn(
            f"transformers-tape could not add TAPE models to {name} ({type(error).__name__}:"
            f" {error}); load them with trust_remote_code=True, or look for a transformers-tape"
            " that supports this version",
            RuntimeWarning,
            stacklevel=2,
        )


class _AliasLoader:
    """Loader of the module `transformers.models.tape`, an alias of this package."""

    @staticmethod
    def create_module(spec):
        """Return None, with which Python creates an ordinary module."""
        return None

    @staticmethod
    def exec_module(module):
        """Give the module the lazily imported classes of this package."""
        module.__getattr__ = __getattr__
        module.__all__ = __all__


class _ImportHook:
    """Import hook that runs the functions of `_AFTER_IMPORT` after their modules have been
    imported.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of the module `name` if this hook changes its import, otherwise None."""
        if name == _MODULE:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, _AliasLoader)
        if name not in _AFTER_IMPORT:
            return None

        # Let another finder locate the module, and extend its loader.
        other_finders = (
            finder
            for finder in sys.meta_path
            if finder is not _ImportHook and hasattr(finder, "find_spec")
        )
        spec = next(
            filter(None, (finder.find_spec(name, path, target) for finder in other_finders)), None
        )
        if spec is not None and spec.loader is not None:
            original_exec_module = spec.loader.exec_module

            def exec_module(module):
                """Execute the module, and change it afterwards."""
                original_exec_module(module)
                _run_after_import(name)

            spec.loader.exec_module = exec_module
        return spec


# Replaces the finder of an earlier import of this module. After a reload, both finders would
# otherwise call each other endlessly.
sys.meta_path[:] = [
    _ImportHook,
    *(finder for finder in sys.meta_path if getattr(finder, "__module__", "") != __name__),
]
for _name in _AFTER_IMPORT:
    if _name in sys.modules:
        _run_after_import(_name)
