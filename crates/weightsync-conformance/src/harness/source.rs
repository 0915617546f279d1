//! Sources of weights that misbehave, or do not lie in order.

use std::sync::{Arc, RwLock};

use weightsync_engine::transport::threads::RwLockExt as _;
use weightsync_engine::{
    Attributes, Dtype, Error, Extracted, Layout, Result, TensorData, TensorRef, Tensors,
    WeightExtractor,
};

use super::command::Stage;
use super::process::die;
use super::shape::{is_module, module};

/// What a source may be asked to do with its tensors.
type Take<'a> = dyn FnMut(&[Extracted<'_>]) -> Result<()> + 'a;

/// A model that the trainer shares with the sender it is registered with.
#[derive(Clone, Debug)]
pub(crate) struct Shared(pub(crate) Arc<RwLock<Tensors>>);

impl Shared {
    fn look<T>(&self, look: impl FnOnce(&dyn WeightExtractor) -> Result<T>) -> Result<T> {
        let tensors = self.0.reading();
        match is_module(&tensors) {
            true => look(&module(&tensors)?),
            false => look(&*tensors),
        }
    }
}

impl WeightExtractor for Shared {
    fn layout(&self) -> Result<Layout> {
        self.look(|source| source.layout())
    }

    fn extract(&self, take: &mut Take<'_>) -> Result<()> {
        self.look(|source| source.extract(take))
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        self.look(|source| source.ties())
    }

    fn attributes(&self) -> Result<Attributes> {
        self.look(|source| source.attributes())
    }
}

/// What happens to a source while it is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SourceFault {
    /// Its process dies.
    Dies(Stage),
    /// Its second tensor cannot be read to the end.
    Fails,
}

/// Tensors that come to grief while they are read.
#[derive(Debug)]
pub(crate) struct FaultySource<'a> {
    pub(crate) tensors: &'a Tensors,
    pub(crate) fault: SourceFault,
}

impl WeightExtractor for FaultySource<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(self.tensors)
    }

    fn extract(&self, take: &mut Take<'_>) -> Result<()> {
        if matches!(self.fault, SourceFault::Dies(Stage::Begun)) {
            die();
        }
        self.tensors.extract(&mut |tensors| {
            let midway = |place: &mut [u8]| {
                let half = place.len() / 2;
                place[..half].fill(0xee);
                match self.fault {
                    SourceFault::Dies(_) => die(),
                    SourceFault::Fails => Err(std::io::Error::other("the source is broken")),
                }
            };
            let lent = tensors.iter().enumerate().map(|(index, one)| {
                let TensorData::InMemory(tensor) = &one.data else {
                    unreachable!("tensors of one's own are in memory")
                };
                let at_midway = matches!(
                    self.fault,
                    SourceFault::Fails | SourceFault::Dies(Stage::Midway)
                );
                let data = match index {
                    1 if at_midway => TensorData::Read {
                        dtype: tensor.dtype(),
                        shape: tensor.shape(),
                        read: &midway,
                    },
                    _ => TensorData::InMemory(tensor.clone()),
                };
                Extracted {
                    name: one.name,
                    data,
                }
            });
            take(&lent.collect::<Vec<_>>())
        })?;
        if matches!(self.fault, SourceFault::Dies(Stage::Written)) {
            die();
        }
        Ok(())
    }
}

/// The tensors of [`Shape::Floats`](super::shape::Shape::Floats) as they may lie
/// in a trainer: a transposed matrix, a view of one element, a vector backwards.
#[derive(Debug)]
pub(crate) struct Strided {
    layout: Layout,
    columns: Vec<u8>,
    scale: Vec<u8>,
    backwards: Vec<u8>,
}

impl Strided {
    pub(crate) fn of(tensors: &Tensors) -> Result<Self> {
        let matrix = tensors.slice::<f32>("weight")?;
        let columns = (0..5).flat_map(|column| (0..97).map(move |row| matrix[row * 5 + column]));
        let steps = tensors.slice::<i64>("steps")?;
        let scale = [f32::NAN, tensors.slice::<f32>("scale")?[0], f32::NAN];
        Ok(Self {
            layout: WeightExtractor::layout(tensors)?,
            columns: columns.flat_map(f32::to_le_bytes).collect(),
            scale: scale.into_iter().flat_map(f32::to_le_bytes).collect(),
            backwards: steps
                .iter()
                .rev()
                .flat_map(|step| step.to_le_bytes())
                .collect(),
        })
    }
}

impl WeightExtractor for Strided {
    fn layout(&self) -> Result<Layout> {
        Ok(self.layout.clone())
    }

    fn extract(&self, take: &mut Take<'_>) -> Result<()> {
        let views = [
            (
                "weight",
                TensorRef::strided(Dtype::F32, &[97, 5], &[1, 97], 0, &self.columns),
            ),
            (
                "scale",
                TensorRef::strided(Dtype::F32, &[], &[], 1, &self.scale),
            ),
            (
                "steps",
                TensorRef::strided(Dtype::I64, &[2], &[-1], 1, &self.backwards),
            ),
        ];
        let lent = views.into_iter().map(|(name, view)| {
            let view = view.map_err(|source| Error::Extract {
                name: name.into(),
                source: source.into(),
            })?;
            Ok(Extracted {
                name,
                data: TensorData::InMemory(view),
            })
        });
        take(&lent.collect::<Result<Vec<_>>>()?)
    }
}
