"""The pool of keys and values, and of recurrent states."""
