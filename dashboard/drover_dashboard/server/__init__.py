"""The console's process: Streamlit, sign-in, assets."""
