"""The mini world: scenes composed from emoji drawings of two vendors that pip packages carry."""
