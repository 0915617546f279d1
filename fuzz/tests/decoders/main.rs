//! One test per decoder; see the crate's documentation for what each input is and what is checked.

mod attach;
mod checkpoint;
mod delta;
mod init;
mod layout;
mod manifest;
mod net;
mod pipe;
mod plain;
mod record;
mod store;
