"""Makes the Grafana dashboard in configs/grafana."""
