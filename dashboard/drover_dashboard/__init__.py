"""The console: Streamlit pages over the Fleet API of a collector."""
