"""Values of config.json, checked. Read `model_config`, then `arguments` and `rope`, which families share."""
