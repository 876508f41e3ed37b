"""What encoders make of images: rows for positions of a prompt, and where these are."""
