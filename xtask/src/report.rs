//! What a run has done: every step runs, whatever became of the steps before it, and the last lines
//! name all that failed, each with its reason and the command that runs it alone.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::places::Places;
use crate::step;

/// How many lines of a failed test's report are repeated at the end.
const LINES: usize = 12;

/// The steps of one run, in their order.
#[derive(Debug)]
pub struct Report {
    begun: Instant,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    name: String,
    took: Duration,
    /// None where it passed.
    failure: Option<String>,
    /// The command that runs this step and no other.
    alone: String,
    tests: Tests,
    /// Processes that tests left behind.
    ended: Vec<String>,
}

/// Who runs the tests of a step.
#[derive(Debug, Clone, Copy)]
pub enum Runner<'a> {
    /// Its report lies where the profile says.
    Nextest {
        /// The profile.
        profile: &'a str,
    },
    /// With this framework's environment, or with that of the tests.
    Pytest {
        /// The framework.
        with: Option<&'a str>,
    },
}

impl Report {
    /// Begins a run.
    pub fn begin() -> Self {
        Self {
            begun: Instant::now(),
            steps: Vec::new(),
        }
    }

    /// Runs a step. `alone` is the command that runs it and no other.
    pub fn step<T>(
        &mut self,
        name: &str,
        alone: &str,
        run: impl FnOnce() -> Result<T, Error>,
    ) -> Option<T> {
        let begun = Instant::now();
        let outcome = run();
        let failure = outcome.as_ref().err().map(|error| {
            let text = error.to_string();
            eprintln!("── {text}");
            text
        });
        self.steps.push(Step {
            name: name.into(),
            took: begun.elapsed(),
            failure,
            alone: alone.into(),
            tests: Tests::default(),
            ended: Vec::new(),
        });
        outcome.ok()
    }

    /// Runs tests, and reads which of them failed from the runner's own report.
    pub fn tests(
        &mut self,
        places: &Places,
        name: &str,
        alone: &str,
        runner: Runner<'_>,
        command: &mut Command,
    ) -> bool {
        let begun = Instant::now();
        let file = runner.file(places, name);
        // That of a run before says nothing about this one.
        let _ = fs::remove_file(&file);
        if let Runner::Pytest { .. } = runner {
            let mut option = std::ffi::OsString::from("--junitxml=");
            option.push(&file);
            command
                .arg(option)
                .arg("--override-ini=junit_family=xunit1");
        }
        let (outcome, ended) = step::run_tests(name, command);
        let tests = fs::read_to_string(&file)
            .ok()
            .and_then(|text| Tests::read(&text, runner));
        let failure = match outcome {
            Err(error) => Some(error.to_string()),
            Ok(_) if !ended.is_empty() => Some("tests left processes behind".into()),
            Ok(_) => None,
        };
        let passed = failure.is_none();
        self.steps.push(Step {
            name: name.into(),
            took: begun.elapsed(),
            failure,
            alone: alone.into(),
            tests: tests.unwrap_or_default(),
            ended,
        });
        passed
    }

    /// Notes a step that did not run, since it needs one that failed.
    pub fn not_run(&mut self, name: &str, alone: &str, why: &str) {
        self.steps.push(Step {
            name: name.into(),
            took: Duration::ZERO,
            failure: Some(format!("did not run: {why}")),
            alone: alone.into(),
            tests: Tests::default(),
            ended: Vec::new(),
        });
    }

    /// Prints every step, what failed, and the numbers of tests, which are the last line.
    ///
    /// # Errors
    ///
    /// [`Error::Steps`] if a step failed.
    pub fn end(self) -> Result<(), Error> {
        eprint!("{}", self.summary());
        match self
            .steps
            .iter()
            .filter(|one| one.failure.is_some())
            .count()
        {
            0 => Ok(()),
            failed => Err(Error::Steps { failed }),
        }
    }

    fn summary(&self) -> String {
        let mut text = String::from("── steps:\n");
        let width = self.steps.iter().map(|one| one.name.len()).max();
        let width = width.unwrap_or(0);
        for one in &self.steps {
            let outcome = if one.failure.is_some() {
                "FAILED"
            } else {
                "ok"
            };
            let took = step::seconds(one.took);
            let _ = writeln!(text, "   {:width$}  {outcome:6}  {took:>9}", one.name);
        }
        let took = step::seconds(self.begun.elapsed());
        let _ = writeln!(text, "   {:width$}  {:6}  {took:>9}", "in all", "");
        let ended: Vec<&String> = self.steps.iter().flat_map(|one| &one.ended).collect();
        if !ended.is_empty() {
            let _ = writeln!(text, "── tests left behind, and the run ended:");
            for line in ended {
                let _ = writeln!(text, "   {line}");
            }
        }
        let failed: Vec<&Step> = self.steps.iter().filter(|s| s.failure.is_some()).collect();
        if !failed.is_empty() {
            let _ = writeln!(text, "── failed, each with the command that runs it alone:");
        }
        for step in failed {
            for test in &step.tests.failed {
                let _ = writeln!(text, "   {}\n      {}", test.name, test.alone);
                for line in &test.why {
                    let _ = writeln!(text, "      | {line}");
                }
            }
            let why = step.failure.as_deref().unwrap_or_default();
            let _ = writeln!(text, "   {}: {why}\n      {}", step.name, step.alone);
        }
        let count = |of: fn(&Tests) -> usize| self.steps.iter().map(|one| of(&one.tests)).sum();
        let (passed, failed, skipped): (usize, usize, usize) = (
            count(|tests| tests.passed),
            count(|tests| tests.failed.len()),
            count(|tests| tests.skipped),
        );
        if passed + failed + skipped > 0 {
            // In this form any reader of test results knows it.
            let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped");
        }
        text
    }
}

impl Runner<'_> {
    fn file(self, places: &Places, name: &str) -> PathBuf {
        match self {
            // nextest keeps it in the clone, wherever it builds to.
            Runner::Nextest { profile } => places.root().join("target/nextest").join(profile),
            Runner::Pytest { .. } => places.target().join("pytest").join(name),
        }
        .join("junit.xml")
    }

    /// The command that runs one test alone, from what its report says of it.
    fn alone(self, suite: &str, name: &str) -> String {
        match self {
            Runner::Nextest { .. } => {
                format!("cargo xtask nextest -E 'binary_id(={suite}) & test(={name})'")
            }
            Runner::Pytest { with } => {
                let with = with.map_or_else(String::new, |with| format!("--with {with} "));
                format!("cargo xtask pytest {with}'{suite}::{name}'")
            }
        }
    }

    /// Why a case failed, from its report: the first lines of what a Rust test said as it panicked,
    /// without its backtrace, and the end of pytest's trace. A test that was ended has only the
    /// message or the type of its end.
    fn why(self, case: roxmltree::Node<'_, '_>) -> Vec<String> {
        let text: Vec<&str> = case
            .children()
            .filter(|node| node.has_tag_name("failure") || node.has_tag_name("error"))
            .filter_map(|node| {
                let text = node.text().filter(|text| !text.trim().is_empty());
                text.or(node.attribute("message"))
                    .or(node.attribute("type"))
            })
            .collect();
        let text = text.join("\n");
        let lines: Vec<String> = text
            .lines()
            .take_while(|line| *line != "stack backtrace:")
            .filter(|line| !line.trim().is_empty())
            .map(|line| line.trim_end().to_owned())
            .collect();
        let left_out = lines.len().saturating_sub(LINES);
        match self {
            Runner::Nextest { .. } => lines.into_iter().take(LINES).collect(),
            Runner::Pytest { .. } => lines.into_iter().skip(left_out).collect(),
        }
    }
}

/// What became of the tests of a step.
#[derive(Debug, Default, PartialEq)]
struct Tests {
    passed: usize,
    skipped: usize,
    failed: Vec<FailedTest>,
}

#[derive(Debug, PartialEq)]
struct FailedTest {
    name: String,
    alone: String,
    /// The lines of what its runner says of the failure that have the reason.
    why: Vec<String>,
}

impl Tests {
    /// What a report in JUnit's form says; none if it is not in that form.
    fn read(text: &str, runner: Runner<'_>) -> Option<Self> {
        let document = roxmltree::Document::parse(text).ok()?;
        let mut tests = Tests::default();
        for case in document
            .descendants()
            .filter(|node| node.has_tag_name("testcase"))
        {
            let has = |tag| case.children().any(|node| node.has_tag_name(tag));
            let attribute = |name| case.attribute(name).unwrap_or_default();
            if has("failure") || has("error") {
                let suite = match runner {
                    Runner::Nextest { .. } => attribute("classname"),
                    Runner::Pytest { .. } => attribute("file"),
                };
                let name = attribute("name");
                let mut failed = FailedTest {
                    name: format!("{suite}::{name}"),
                    alone: runner.alone(suite, name),
                    why: runner.why(case),
                };
                if attribute("classname").is_empty() {
                    // A file that pytest could not read has its own name for that of a test.
                    failed.alone = failed.alone.replace(&format!("::{name}"), "");
                }
                // pytest reports a test twice whose end fails too.
                match tests.failed.iter_mut().find(|one| one.name == failed.name) {
                    Some(known) => known.why.append(&mut failed.why),
                    None => tests.failed.push(failed),
                }
            } else if has("skipped") {
                tests.skipped += 1;
            } else {
                tests.passed += 1;
            }
        }
        Some(tests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_read_from_reports_with_the_command_that_runs_each() {
        let nextest = r#"<testsuites><testsuite name="weightsync-net::hosts">
            <testcase name="links::a" classname="weightsync-net::hosts"/>
            <testcase name="links::b" classname="weightsync-net::hosts"><failure>thread 'main' panicked

it broke 
stack backtrace:
   0: __rustc::rust_begin_unwind</failure></testcase>
            <testcase name="links::c" classname="weightsync-net::hosts"><failure type="test timeout"/></testcase>
            </testsuite></testsuites>"#;
        let tests = Tests::read(nextest, Runner::Nextest { profile: "default" }).expect("a report");
        assert_eq!((tests.passed, tests.skipped), (1, 0));
        let failed = |name: &str, why: &[&str]| FailedTest {
            name: format!("weightsync-net::hosts::{name}"),
            alone: format!(
                "cargo xtask nextest -E 'binary_id(=weightsync-net::hosts) & test(={name})'"
            ),
            why: why.iter().map(ToString::to_string).collect(),
        };
        assert_eq!(
            tests.failed,
            [
                failed("links::b", &["thread 'main' panicked", "it broke"]),
                failed("links::c", &["test timeout"]),
            ]
        );
        let pytest = r#"<testsuites><testsuite>
            <testcase classname="a" file="python/tests/core/test_a.py" name="test_b[1]"><error/></testcase>
            <testcase classname="a" file="python/tests/core/test_a.py" name="test_b[1]"><failure/></testcase>
            <testcase classname="a" file="python/tests/core/test_a.py" name="test_c"><skipped/></testcase>
            </testsuite></testsuites>"#;
        for (with, option) in [(None, ""), (Some("vllm"), "--with vllm ")] {
            let tests = Tests::read(pytest, Runner::Pytest { with }).expect("a report");
            assert_eq!((tests.passed, tests.skipped, tests.failed.len()), (0, 1, 1));
            assert_eq!(
                tests.failed[0].alone,
                format!("cargo xtask pytest {option}'python/tests/core/test_a.py::test_b[1]'")
            );
        }
        assert_eq!(Tests::read("", Runner::Pytest { with: None }), None);
    }

    #[test]
    fn long_reports_keep_the_lines_that_have_the_reason() {
        let lines: Vec<String> = (0..2 * LINES).map(|at| format!("line {at}")).collect();
        let report = format!(
            "<testcase name='a' classname='b' file='c'><failure>{}</failure></testcase>",
            lines.join("\n")
        );
        for (runner, expected) in [
            (Runner::Nextest { profile: "default" }, &lines[..LINES]),
            (Runner::Pytest { with: None }, &lines[LINES..]),
        ] {
            let tests = Tests::read(&report, runner).expect("a report");
            assert_eq!(tests.failed[0].why, expected);
        }
    }

    #[test]
    fn run_goes_on_after_a_failed_step_and_names_it_at_the_end() {
        let mut report = Report::begin();
        let fails = || step::run("first", Command::new("sh").args(["-c", "exit 3"]));
        assert!(report.step("first", "cargo first", fails).is_none());
        assert!(report.step("second", "cargo second", || Ok(())).is_some());
        report.not_run("third", "cargo third", "`first` failed");
        let text = report.summary();
        for part in [
            "first   FAILED",
            "second  ok",
            "exit status 3\n      cargo first\n",
            "did not run: `first` failed\n      cargo third\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(matches!(report.end(), Err(Error::Steps { failed: 2 })));
    }
}
