"""What `drover fleet` reads: what reports, Slurm, Kubernetes, an Ansible inventory; and the fleet file it makes."""
