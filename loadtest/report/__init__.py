"""From observed requests to numbers, figures and pages."""
