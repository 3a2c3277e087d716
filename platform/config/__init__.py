"""Configuration: experiments, validation, overrides, presets, plugins, engine settings. Never imports the engines."""
