"""Online training of the drafter inside SGLang."""
