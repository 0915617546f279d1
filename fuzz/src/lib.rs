//! Fuzz targets for every decoder, as tests that run on stable.
