"""The scripted engine: plays the replies of a script, without a model. `acting` is a script that acts like a model."""
