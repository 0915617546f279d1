//! Models behind references, boxes and locks: what lends or shares a model is a
//! model.

use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use weightsync_core::Layout;

use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::extract::{CrateOnly, Extracted, WeightExtractor};
use crate::load::{TensorView, WeightLoader};
use crate::snapshot::Snapshot;

const POISONED: &str = "a thread panicked while it had the lock: the weights may be half-written";

macro_rules! pass_on_extraction {
    ($($pointer:ty),*) => {
        $(impl<E: WeightExtractor + ?Sized> WeightExtractor for $pointer {
            fn layout(&self) -> Result<Layout> {
                (**self).layout()
            }

            fn plain_bytes(&self, layout: &Layout, asked: CrateOnly) -> Option<Vec<&[u8]>> {
                (**self).plain_bytes(layout, asked)
            }

            fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
                (**self).extract(take)
            }

            fn ties(&self) -> Result<Vec<(String, String)>> {
                (**self).ties()
            }

            fn attributes(&self) -> Result<Attributes> {
                (**self).attributes()
            }
        })*
    };
}

pass_on_extraction!(&E, &mut E, Box<E>, Arc<E>);

macro_rules! pass_on_loading {
    ($($pointer:ty),*) => {
        $(impl<L: WeightLoader + ?Sized> WeightLoader for $pointer {
            fn layout(&self) -> Result<Layout> {
                (**self).layout()
            }

            fn shape(&mut self, layout: &Layout) -> Result<bool> {
                (**self).shape(layout)
            }

            fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
                (**self).bind(snapshot)
            }

            fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
                (**self).load(tensors)
            }
        })*
    };
}

pass_on_loading!(&mut L, Box<L>);

/// A model that is locked for each call, for as long as the call takes. A lock
/// that a panic has poisoned is an error: nothing half-written is sent.
macro_rules! lock {
    ($($lock:ident: $read:ident, $write:ident;)*) => {
        // Without `plain_bytes`: the bytes that it returns would outlive the lock.
        $(impl<E: WeightExtractor + ?Sized> WeightExtractor for $lock<E> {
            fn layout(&self) -> Result<Layout> {
                $read(self).ok_or_else(not_sent)?.layout()
            }

            fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
                // The lock is held until the source is read: the model cannot change between two of
                // its tensors.
                $read(self).ok_or_else(not_sent)?.extract(take)
            }

            fn ties(&self) -> Result<Vec<(String, String)>> {
                $read(self).ok_or_else(not_sent)?.ties()
            }

            fn attributes(&self) -> Result<Attributes> {
                $read(self).ok_or_else(not_sent)?.attributes()
            }
        }

        impl<L: WeightLoader + ?Sized> WeightLoader for $lock<L> {
            fn layout(&self) -> Result<Layout> {
                $read(self).ok_or_else(not_loaded)?.layout()
            }

            fn shape(&mut self, layout: &Layout) -> Result<bool> {
                $write(self).ok_or_else(not_loaded)?.shape(layout)
            }

            fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
                $write(self).ok_or_else(not_loaded)?.bind(snapshot)
            }

            fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
                $write(self).ok_or_else(not_loaded)?.load(tensors)
            }
        }

        // Not by `pass_on_loading`: an `Arc` lends nothing mutably, and its lock does.
        impl<L: WeightLoader + ?Sized> WeightLoader for Arc<$lock<L>> {
            fn layout(&self) -> Result<Layout> {
                $read(self).ok_or_else(not_loaded)?.layout()
            }

            fn shape(&mut self, layout: &Layout) -> Result<bool> {
                $write(self).ok_or_else(not_loaded)?.shape(layout)
            }

            fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
                $write(self).ok_or_else(not_loaded)?.bind(snapshot)
            }

            fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
                $write(self).ok_or_else(not_loaded)?.load(tensors)
            }
        })*
    };
}

lock! {
    Mutex: locked, locked;
    RwLock: read_locked, write_locked;
}

fn locked<T: ?Sized>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    lock.lock().ok()
}

fn read_locked<T: ?Sized>(lock: &RwLock<T>) -> Option<RwLockReadGuard<'_, T>> {
    lock.read().ok()
}

fn write_locked<T: ?Sized>(lock: &RwLock<T>) -> Option<RwLockWriteGuard<'_, T>> {
    lock.write().ok()
}

fn not_sent() -> Error {
    Error::extract("the whole model", POISONED)
}

fn not_loaded() -> Error {
    Error::load("the whole model", POISONED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Strategy;
    use crate::tensors::Tensors;

    fn model(value: f32) -> Tensors {
        let mut model = Tensors::new();
        model.insert("weight", [1], [value]).unwrap();
        model
    }

    fn apply(from: &dyn WeightExtractor, to: &mut dyn WeightLoader) -> Result<()> {
        Strategy::StateDict.extract(from)?.apply_to(to)
    }

    #[test]
    fn every_way_to_hold_a_model_is_one() {
        let mut own = model(0.0);
        let mutex = Arc::new(Mutex::new(model(0.0)));
        let lock = Arc::new(RwLock::new(Tensors::new()));
        let boxed: Box<dyn WeightExtractor> = Box::new(model(5.0));
        apply(&boxed, &mut mutex.clone()).unwrap();
        // Without shapes yet: it takes those that come.
        apply(&mutex, &mut lock.clone()).unwrap();
        let mut in_a_box: Box<dyn WeightLoader + '_> = Box::new(&mut own);
        apply(&&lock, &mut in_a_box).unwrap();
        drop(in_a_box);
        assert_eq!(own.slice::<f32>("weight").unwrap(), [5.0]);
        assert_eq!(lock.read().unwrap().slice::<f32>("weight").unwrap(), [5.0]);
    }

    #[test]
    fn a_poisoned_lock_is_an_error() {
        let mutex = Arc::new(Mutex::new(model(1.0)));
        let lock = Arc::new(RwLock::new(model(1.0)));
        let (in_mutex, in_lock) = (mutex.clone(), lock.clone());
        let panicked = std::thread::spawn(move || {
            let _held = (in_mutex.lock().unwrap(), in_lock.write().unwrap());
            panic!("halfway through a step");
        });
        assert!(panicked.join().is_err());
        for shared in [&mutex as &dyn WeightExtractor, &lock] {
            let error = shared.layout().unwrap_err();
            assert!(matches!(error, Error::Extract { .. }), "{error}");
            assert!(shared.extract(&mut |_| panic!("nothing is lent")).is_err());
        }
        for shared in [
            &mut mutex.clone() as &mut dyn WeightLoader,
            &mut lock.clone(),
        ] {
            let error = shared.load(&[]).unwrap_err();
            assert!(matches!(error, Error::Load { .. }), "{error}");
        }
    }
}
