//! The models in the hands of the worker's own threads.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{RwLockReadGuard, RwLockWriteGuard};

use weightsync_core::{ModelId, Run, Version};

use super::hold::HeldModels;
use super::model_lock::{ModelPermit, OwnedPermit};
use crate::error::Result;
use crate::report::only_version;

/// The models to read: one whole set, that does not change while this is held.
pub struct ModelGuard<'a, M> {
    // Dropped before the permit: the thread with the next permit finds the lock free.
    pub(super) held: RwLockReadGuard<'a, HeldModels<M>>,
    pub(super) _permit: ModelPermit<'a>,
}

/// The models to change; see [`Background::write`](super::Background::write).
pub struct ModelGuardMut<'a, M> {
    pub(super) held: RwLockWriteGuard<'a, HeldModels<M>>,
    pub(super) _permit: ModelPermit<'a>,
}

/// Keeps the models of a [`Background`](super::Background) as they are; see
/// [`Background::hold`](super::Background::hold).
#[derive(Debug)]
#[must_use = "the models may change as soon as it is dropped"]
pub struct ModelHold {
    pub(super) _permit: OwnedPermit,
}

// What both guards have in common.
macro_rules! guard {
    ($guard:ident) => {
        impl<M> $guard<'_, M> {
            /// The version of the only model.
            ///
            /// # Errors
            ///
            /// [`Error::SeveralModels`](crate::Error::SeveralModels).
            pub fn version(&self) -> Result<Version> {
                only_version(&self.held.versions)
            }

            /// The version of each model.
            pub fn versions(&self) -> &[(ModelId, Version)] {
                &self.held.versions
            }

            /// The run of these versions.
            pub fn run(&self) -> Run {
                self.held.run
            }
        }

        impl<M> Deref for $guard<'_, M> {
            type Target = M;

            fn deref(&self) -> &M {
                &self.held.models
            }
        }

        impl<M> fmt::Debug for $guard<'_, M> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($guard))
                    .field("versions", &self.held.versions)
                    .finish_non_exhaustive()
            }
        }
    };
}

guard!(ModelGuard);
guard!(ModelGuardMut);

impl<M> DerefMut for ModelGuardMut<'_, M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.held.models
    }
}
