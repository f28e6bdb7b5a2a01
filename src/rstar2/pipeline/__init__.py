"""The recipe as a whole: stages strung together, resumed, watched, compared."""
