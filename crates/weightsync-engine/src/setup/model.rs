//! One model of a sender that is being set up.

use weightsync_core::{Dtype, ModelId};

use super::Source;
use crate::error::Result;
use crate::extract::{WeightExtractor, cast_layout};
use crate::publish::Prepared;
use crate::transport::ModelSpec;

/// One model of the set.
#[derive(Clone)]
pub(crate) struct SetupModel {
    pub(crate) prepared: Prepared,
    pub(super) source: Option<Source>,
}

impl SetupModel {
    /// The source that was registered.
    pub(crate) fn source(&self) -> Option<&dyn WeightExtractor> {
        let source = self.source.as_deref()?;
        Some(source)
    }

    pub(super) fn new(id: &str, source: &dyn WeightExtractor) -> Result<Self> {
        Ok(Self {
            prepared: Prepared::new(ModelId::new(id)?, source)?,
            source: None,
        })
    }

    pub(super) fn cast(mut self, dtype: Option<Dtype>) -> Result<Self> {
        self.prepared.layout = cast_layout(&self.prepared.source, dtype)?;
        Ok(self)
    }

    pub(super) fn passed_on(spec: ModelSpec) -> Self {
        let ModelSpec {
            id,
            layout,
            attributes,
        } = spec;
        Self {
            prepared: Prepared {
                id,
                source: layout.clone(),
                layout,
                attributes,
            },
            source: None,
        }
    }

    pub(super) fn spec(&self) -> ModelSpec {
        ModelSpec {
            id: self.prepared.id.clone(),
            layout: self.prepared.layout.clone(),
            attributes: self.prepared.attributes.clone(),
        }
    }
}
