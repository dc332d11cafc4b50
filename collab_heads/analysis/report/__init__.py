"""All measures of one model together, as text, pictures and a page."""
