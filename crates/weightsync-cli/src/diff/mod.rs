//! `weightsync diff`: what changed between two checkpoint files, tensor by tensor.

mod compare;
mod json;
mod picture;
mod table;
mod tally;
mod ulps;

use std::error::Error;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use weightsync_engine::SafetensorsFile;

use crate::output::print;
use crate::words::shown;
use crate::{FAILURE, SUCCESS};

/// The exit code if the files could not be compared, as diff(1) has it; 1 says that they differ.
pub const TROUBLE: u8 = 2;

/// What `diff` is asked for.
#[derive(clap::Args)]
#[command(after_long_help = json::FIELDS)]
pub struct DiffArgs {
    /// The older safetensors file
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The newer one
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Also draw it: the share that changed of the tensors of which most did, and the steps
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// One JSON object a line; --help says which fields they have
    #[arg(long)]
    json: bool,
}

/// Compares, and shows what came of it.
pub fn run(args: &DiffArgs) -> Result<u8, Box<dyn Error>> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    // Before the files are compared, which may take minutes.
    if let Some(svg) = &args.svg {
        not_an_input(svg, [&args.a, &args.b])?;
    }
    // Errors and the bar share standard error, so standard output has the result alone.
    let bar = progress_bar();
    let compared = compare::compare(&a, &b, |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    });
    // The bar goes before anything is printed.
    bar.finish_and_clear();
    // Reading past the end, or bytes that moved, come from a file that was changed meanwhile.
    let compared = compared.map_err(|error| {
        format!("{error}; the files are to stay as they are while they are compared")
    })?;
    let text = match args.json {
        true => json::json(&compared)?,
        false => {
            let name = |path: &Path| shown(&path.display().to_string());
            let (a, b) = (name(&args.a), name(&args.b));
            format!("A  {a}\nB  {b}\n\n{}", table::text(&compared))
        }
    };
    print(&text)?;
    if let Some(path) = &args.svg {
        let svg = picture::draw(&compared)?;
        // The picture comes last: without it the table has been printed.
        fs::write(path, svg).map_err(|error| format!("writing {}: {error}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    // As diff(1) has it: 0 for equal files, 1 for files that differ.
    Ok(match compared.same() {
        true => SUCCESS,
        false => FAILURE,
    })
}

/// Opens one of the files, or says what to give in its place.
fn open(path: &Path) -> Result<SafetensorsFile, String> {
    SafetensorsFile::open(path).map_err(|error| {
        let weightsync_engine::Error::File { source, .. } = &error else {
            // Of what it says it holds, without a word of where.
            return format!("opening {}: {error}", path.display());
        };
        let system = source.downcast_ref();
        let advice = match system.map(io::Error::kind) {
            Some(io::ErrorKind::NotFound) => "expected a safetensors file: check the path",
            Some(io::ErrorKind::PermissionDenied) => "expected a file that you may read",
            _ if path.is_dir() => {
                "expected a safetensors file: compare those of a checkpoint one by one"
            }
            _ => {
                "expected a whole safetensors file: copy it again if it was cut short, or save the \
                 checkpoint in that format first"
            }
        };
        format!("{error}; {advice}")
    })
}

/// A picture in place of a checkpoint would be the end of the checkpoint.
fn not_an_input(svg: &Path, inputs: [&PathBuf; 2]) -> Result<(), String> {
    // By device and number, so links and other spellings of a path are found too.
    let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    let own = identity(svg);
    match own.is_some() && inputs.iter().any(|input| identity(input) == own) {
        true => Err(format!(
            "--svg {} is one of the files to compare, and would be overwritten: name another file",
            svg.display()
        )),
        false => Ok(()),
    }
}

/// How far it is, where errors go, if that is a terminal.
fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template("comparing {bar:40.cyan} {bytes} of {total_bytes}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
