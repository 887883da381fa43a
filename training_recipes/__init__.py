"""Training recipes: flat scripts, run from a checkout as `python -m training_recipes.train`."""
