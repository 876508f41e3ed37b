"""From observed requests to numbers, figures and pages. Sends nothing and knows no HTTP."""
