//! Models by name and by path: what a worker, or a trainer, has.

use std::collections::BTreeMap;
use std::fmt;

use crate::extract::WeightExtractor;
use crate::load::WeightLoader;
use crate::path::{ModelPath, ModelPathError, PathPart};

/// A model: its weights can be read and replaced.
pub trait Model: WeightExtractor + WeightLoader {}

impl<M: WeightExtractor + WeightLoader + ?Sized> Model for M {}

/// Something that has models under paths: a worker's environments and
/// transforms, a trainer's networks.
///
/// A program's own tree implements it by matching on the parts of the path;
/// [`Models`] and [`ModuleTree`] are for those that have none.
pub trait ModelTree {
    /// The weights of the model there.
    ///
    /// # Errors
    ///
    /// [`ModelPathError::NoSuchPart`] or [`ModelPathError::NoModel`], with what
    /// there is.
    fn extractor(&self, path: &ModelPath) -> Result<&dyn WeightExtractor, ModelPathError>;

    /// The place where that model takes weights.
    ///
    /// # Errors
    ///
    /// As [`extractor`](Self::extractor).
    fn loader(&mut self, path: &ModelPath) -> Result<&mut dyn WeightLoader, ModelPathError>;

    /// Where there are models, so that all of them can be registered without
    /// naming each.
    fn paths(&self) -> Vec<ModelPath>;
}

/// Models registered one by one, each under its whole name: `env.value_net` is
/// one name here, and needs no `env`.
///
/// ```
/// use weightsync::model::{ModelTree, Models};
/// use weightsync::Tensors;
///
/// let mut policy = Tensors::new();
/// policy.insert("weight", [1], [1.0_f32])?;
/// let mut models = Models::new();
/// models.register("policy".parse()?, &mut policy)?;
/// let found = models.extractor(&"policy".parse()?)?;
/// assert_eq!(found.layout()?.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Models<'a> {
    models: BTreeMap<ModelPath, Box<dyn Model + 'a>>,
}

/// Models in a tree: each stands under the one that it is a part of, and lists
/// have places.
///
/// Its errors say how far a path leads, and what there is from there on.
#[derive(Default)]
pub struct ModuleTree<'a> {
    root: Module<'a>,
}

#[derive(Default)]
struct Module<'a> {
    model: Option<Box<dyn Model + 'a>>,
    parts: BTreeMap<PathPart, Module<'a>>,
}

impl<'a> Models<'a> {
    /// No models.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model, its own or lent (`&mut model`).
    ///
    /// # Errors
    ///
    /// [`ModelPathError::Taken`].
    pub fn register(
        &mut self,
        path: ModelPath,
        model: impl Model + 'a,
    ) -> Result<(), ModelPathError> {
        if self.models.contains_key(&path) {
            return Err(ModelPathError::Taken { path });
        }
        self.models.insert(path, Box::new(model));
        Ok(())
    }

    fn unknown(&self, path: &ModelPath) -> ModelPathError {
        let known = self
            .models
            .keys()
            .map(|path| PathPart::Name(path.to_string()));
        ModelPathError::NoSuchPart {
            path: path.clone(),
            part: PathPart::Name(path.to_string()),
            below: String::new(),
            known: known.collect(),
        }
    }
}

impl<'a> ModuleTree<'a> {
    /// No models.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model, its own or lent (`&mut model`), with the parts that lead to
    /// it.
    ///
    /// # Errors
    ///
    /// [`ModelPathError::Taken`].
    pub fn register(
        &mut self,
        path: ModelPath,
        model: impl Model + 'a,
    ) -> Result<(), ModelPathError> {
        let mut module = &mut self.root;
        for part in path.parts() {
            module = module.parts.entry(part.clone()).or_default();
        }
        if module.model.is_some() {
            return Err(ModelPathError::Taken { path });
        }
        module.model = Some(Box::new(model));
        Ok(())
    }
}

impl ModelTree for Models<'_> {
    fn extractor(&self, path: &ModelPath) -> Result<&dyn WeightExtractor, ModelPathError> {
        match self.models.get(path) {
            Some(model) => Ok(model),
            None => Err(self.unknown(path)),
        }
    }

    fn loader(&mut self, path: &ModelPath) -> Result<&mut dyn WeightLoader, ModelPathError> {
        // Looked up twice: a borrow that may be returned would last through the error's `self`.
        if !self.models.contains_key(path) {
            return Err(self.unknown(path));
        }
        match self.models.get_mut(path) {
            Some(model) => Ok(model),
            None => unreachable!("it existed just now"),
        }
    }

    fn paths(&self) -> Vec<ModelPath> {
        self.models.keys().cloned().collect()
    }
}

impl ModelTree for ModuleTree<'_> {
    fn extractor(&self, path: &ModelPath) -> Result<&dyn WeightExtractor, ModelPathError> {
        let mut module = &self.root;
        for (step, part) in path.parts().iter().enumerate() {
            let below = module.parts.get(part);
            module = below.ok_or_else(|| module.no_such_part(path, step))?;
        }
        match &module.model {
            Some(model) => Ok(model),
            None => Err(module.no_model(path)),
        }
    }

    fn loader(&mut self, path: &ModelPath) -> Result<&mut dyn WeightLoader, ModelPathError> {
        let mut module = &mut self.root;
        for (step, part) in path.parts().iter().enumerate() {
            if !module.parts.contains_key(part) {
                return Err(module.no_such_part(path, step));
            }
            module = match module.parts.get_mut(part) {
                Some(module) => module,
                None => unreachable!("it existed just now"),
            };
        }
        if module.model.is_none() {
            return Err(module.no_model(path));
        }
        match &mut module.model {
            Some(model) => Ok(model),
            None => unreachable!("it existed just now"),
        }
    }

    fn paths(&self) -> Vec<ModelPath> {
        let mut paths = Vec::new();
        self.root.collect(&mut Vec::new(), &mut paths);
        paths
    }
}

impl Module<'_> {
    fn no_such_part(&self, path: &ModelPath, step: usize) -> ModelPathError {
        ModelPathError::NoSuchPart {
            path: path.clone(),
            part: path.parts()[step].clone(),
            below: path.beginning(step),
            known: self.parts.keys().cloned().collect(),
        }
    }

    fn no_model(&self, path: &ModelPath) -> ModelPathError {
        ModelPathError::NoModel {
            path: path.clone(),
            known: self.parts.keys().cloned().collect(),
        }
    }

    /// As deep as the longest path, which is bounded.
    fn collect(&self, above: &mut Vec<PathPart>, paths: &mut Vec<ModelPath>) {
        if self.model.is_some() {
            paths.push(ModelPath::from_parts(above.clone()));
        }
        for (part, module) in &self.parts {
            above.push(part.clone());
            module.collect(above, paths);
            above.pop();
        }
    }
}

impl fmt::Debug for Models<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.models.keys()).finish()
    }
}

impl fmt::Debug for ModuleTree<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.paths()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Tensors;

    fn model(value: f32) -> Tensors {
        let mut model = Tensors::new();
        model.insert("weight", [1], [value]).unwrap();
        model
    }

    fn path(text: &str) -> ModelPath {
        text.parse().unwrap()
    }

    /// Copies the weights at one path to another, through nothing but the trait.
    fn copy(tree: &mut dyn ModelTree, from: &str, to: &str) -> Result<(), ModelPathError> {
        let weights = crate::Strategy::StateDict
            .extract(tree.extractor(&path(from))?)
            .unwrap();
        weights.apply_to(tree.loader(&path(to))?).unwrap();
        Ok(())
    }

    #[test]
    fn models_are_found_in_both_kinds_of_tree() {
        let (mut first, mut second) = (model(1.0), model(2.0));
        let mut models = Models::new();
        models.register(path("env.value_net"), &mut first).unwrap();
        models.register(path("transforms[0]"), model(3.0)).unwrap();
        copy(&mut models, "transforms[0]", "env.value_net").unwrap();
        assert_eq!(
            models.paths(),
            [path("env.value_net"), path("transforms[0]")]
        );
        drop(models);
        assert_eq!(first.slice::<f32>("weight").unwrap(), [3.0]);

        let mut tree = ModuleTree::new();
        tree.register(path("transforms[0].net"), &mut second)
            .unwrap();
        tree.register(path("transforms[0]"), model(4.0)).unwrap();
        copy(&mut tree, "transforms[0]", "transforms[0].net").unwrap();
        assert_eq!(
            tree.paths(),
            [path("transforms[0]"), path("transforms[0].net")]
        );
        drop(tree);
        assert_eq!(second.slice::<f32>("weight").unwrap(), [4.0]);
    }

    #[test]
    fn errors_name_what_there_is_where_the_path_fails() {
        let mut tree = ModuleTree::new();
        tree.register(path("env.value_net"), model(1.0)).unwrap();
        tree.register(path("env.transforms[1]"), model(1.0))
            .unwrap();
        let cases = [
            (
                "policy",
                "policy does not exist: the root has no policy; it has env",
            ),
            (
                "env.net",
                "env.net does not exist: env has no net; it has transforms, value_net",
            ),
            (
                "env.transforms[0].net",
                "env.transforms[0].net does not exist: env.transforms has no [0]; it has [1]",
            ),
            (
                "env",
                "env is not a model; below it are transforms, value_net",
            ),
            (
                "env.value_net.a",
                "env.value_net.a does not exist: env.value_net has no a; it has nothing",
            ),
        ];
        for (text, expected) in cases {
            let error = tree.loader(&path(text)).err().unwrap();
            assert_eq!(error.to_string(), expected);
            assert_eq!(tree.extractor(&path(text)).err().unwrap(), error);
        }
        let error = tree
            .register(path("env.value_net"), model(1.0))
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is a model at env.value_net already"
        );

        let mut models = Models::new();
        models.register(path("env.value_net"), model(1.0)).unwrap();
        let error = models.extractor(&path("env")).err().unwrap().to_string();
        assert!(error.contains("it has env.value_net"), "{error}");
        assert!(models.loader(&path("env")).is_err());
        let error = models
            .register(path("env.value_net"), model(1.0))
            .unwrap_err();
        assert!(matches!(error, ModelPathError::Taken { .. }));
    }
}
