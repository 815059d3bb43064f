"""A model, data and a loss bound to one context in which they can be measured."""
