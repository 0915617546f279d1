use super::*;

#[test]
fn every_scheme_is_its_text() {
    for text in [
        "shared-mem",
        "shared-mem:pull",
        "multi-process",
        "multi-process:every=1",
        "multi-process:every=32,own-copy",
        "multi-process:own-copy",
        "none",
    ] {
        let scheme: AnyScheme = text.parse().unwrap();
        assert_eq!(scheme.to_string(), text);
        let json = serde_json::to_string(&scheme).unwrap();
        assert_eq!(serde_json::from_str::<AnyScheme>(&json).unwrap(), scheme);
        let bytes = postcard::to_stdvec(&scheme).unwrap();
        assert_eq!(postcard::from_bytes::<AnyScheme>(&bytes).unwrap(), scheme);
    }
}

#[test]
fn scheme_lists_known_names_for_an_unknown_one() {
    for (text, hint) in [
        ("", "multi-process, none, "),
        ("sharedmem", "shared-mem"),
        ("shared-mem:fast", "pull"),
        ("shared-mem:pull=maybe", "true or false"),
        ("multi-process:every", "1 to 32"),
        ("multi-process:every=0", "1 to 32"),
        ("multi-process:every=33", "1 to 32"),
        ("none:pull", "none at all"),
        ("shared-mem:pull,pull=false", "once"),
        ("multi-process:every=2, every=3", "once"),
    ] {
        let error = text.parse::<AnyScheme>().unwrap_err().to_string();
        assert!(error.contains(hint), "{text:?}: {error}");
    }
}

/// A scheme of one's own, with settings that somebody made up.
#[derive(Clone, Debug)]
struct Own(&'static str, Vec<(String, String)>);

impl Scheme for Own {
    fn name(&self) -> &str {
        self.0
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.1.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::NONE
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        Endpoint::fresh(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        NoSync.open(opening)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        NoSync.join(at, joining, deadline)
    }
}

inventory::submit! {
    Registration::new("own", |settings| {
        let settings = settings.clone().into_iter().collect();
        Ok(AnyScheme::new(Own("own", settings)))
    })
}

inventory::submit! { Registration::new("twice", |_| Ok(AnyScheme::default())) }
inventory::submit! { Registration::new("twice", |_| Ok(AnyScheme::default())) }

#[test]
fn name_of_two_schemes_is_refused() {
    let error = "twice".parse::<AnyScheme>().unwrap_err().to_string();
    assert!(
        error.contains("one scheme of this name in the program, got \"2\""),
        "{error}"
    );
}

#[test]
fn scheme_with_unspeakable_settings_is_refused() {
    let own = |word, settings: &[(&str, &str)]| {
        let settings = settings.iter();
        let settings = settings.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        AnyScheme::new(Own(word, settings.collect()))
    };
    let long = "x".repeat(MAX_TEXT);
    let weights = crate::Tensors::new();
    let setup = || crate::SenderSetup::new("policy", &weights).unwrap();
    for fine in [
        own("own", &[]),
        own("own", &[("dir", "/srv/a b:c=d"), ("fast", ""), ("at", "ß")]),
    ] {
        let info = setup().scheme(fine.clone()).unwrap().init_info();
        let read: AnyScheme = info.scheme().parse().unwrap();
        let (mut read, mut written) = (read.0.settings(), fine.0.settings());
        read.sort();
        written.sort();
        assert_eq!(read, written);
    }
    for (wrong, hint) in [
        (own("own", &[("dir", "/srv/a,b")]), "\"dir\""),
        (own("own", &[("dir", " /srv")]), "spaces"),
        (own("own", &[("dir", "/srv\n")]), "spaces"),
        (own("own", &[("a=b", "c")]), "equals signs"),
        (own("own", &[("a,b", "c")]), "commas"),
        (own("own", &[("", "")]), "name"),
        (own("own", &[("a", "1"), ("a", "2")]), "once"),
        (own("o:n", &[]), "colon"),
        (own("", &[]), "word"),
        (own("own", &[("dir", &long)]), "1024 bytes"),
    ] {
        let refused = setup().scheme(wrong.clone()).unwrap_err();
        assert!(matches!(refused, Error::BadSetting { .. }), "{refused}");
        assert!(refused.to_string().contains(hint), "{refused}");
        let refused = serde_json::to_string(&wrong).unwrap_err().to_string();
        assert!(refused.contains(hint), "{refused}");
    }
}
