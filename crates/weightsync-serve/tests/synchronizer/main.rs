//! Trainers, explorers and a synchronizer in one program, and over HTTP.

mod http;
mod styles;
mod world;
