//! One test per decoder; see the crate's documentation for what each input is and what is checked.

mod attach;
mod layout;
mod manifest;
mod record;
