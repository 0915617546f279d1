//! What went wrong with a request, for people and for the rest of this crate.

use std::error::Error as _;
use std::io::{self, ErrorKind};

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

/// More of a store's answer than this says nothing more.
const MOST: usize = 600;

/// The same error, as the interface of storage has it.
pub(super) fn io_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => ErrorKind::NotFound,
        Error::AlreadyExists { .. } => ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            ErrorKind::PermissionDenied
        }
        Error::NotImplemented { .. } | Error::NotSupported { .. } => ErrorKind::Unsupported,
        Error::InvalidPath { .. } => ErrorKind::InvalidInput,
        other => transport(other).unwrap_or(ErrorKind::Other),
    };
    io::Error::new(kind, plain(&error.to_string()))
}

/// What kind of failure the connection had, if it was that.
fn transport(error: &Error) -> Option<ErrorKind> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return match http.kind() {
                HttpErrorKind::Connect => Some(ErrorKind::NotConnected),
                HttpErrorKind::Timeout => Some(ErrorKind::TimedOut),
                HttpErrorKind::Interrupted => Some(ErrorKind::ConnectionAborted),
                _ => None,
            };
        }
        source = error.source();
    }
    None
}

/// Whether a condition was not met, so that nothing was written by this request.
pub(super) fn is_refused(error: &Error) -> bool {
    matches!(
        error,
        Error::AlreadyExists { .. } | Error::Precondition { .. } | Error::NotModified { .. }
    )
}

/// `None` for an object that is not there. A bucket that is not there is an error.
pub(super) fn found<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error @ Error::NotFound { .. }) => {
            // As S3, Google and Azure name it.
            let text = error.to_string();
            // A missing bucket is an error, and no empty store.
            let names = ["NoSuchBucket", "bucket does not exist", "ContainerNotFound"];
            match names.iter().any(|name| text.contains(name)) {
                true => Err(error),
                false => Ok(None),
            }
        }
        Err(error) => Err(error),
    }
}

/// One line, with the code and message of an answer in XML instead of all of it.
fn plain(text: &str) -> String {
    let part = |name: &str| -> Option<&str> {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let mut line = match (text.split_once('<'), part("Code")) {
        (Some((before, _)), Some(code)) => {
            let message = part("Message").unwrap_or_default();
            format!("{before}{code}: {message}")
        }
        _ => text.to_owned(),
    };
    // In one line: services answer with pages of XML.
    line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    line.truncate(line.floor_char_boundary(MOST));
    if let Some(hint) = hint(&line) {
        line.push_str(hint);
    }
    line
}

/// What to do, where the client's words do not say it.
fn hint(line: &str) -> Option<&'static str> {
    // Where cloud machines have keys: the client asks there if the environment has none.
    if line.contains("169.254.169.254") || line.contains("metadata.google.internal") {
        return Some(
            "; no keys were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY \
             (GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_NAME and \
             AZURE_STORAGE_ACCOUNT_KEY), or run where the cloud gives this machine a role",
        );
    }
    (line.contains("scheme is not allowed")
        || line.contains("Allow HTTP")
        || line.contains("allow_http"))
    .then_some(
        "; an endpoint by http:// needs AWS_ALLOW_HTTP=true (GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP): \
         a reader of the traffic then reads the weights",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_found(answer: &str) -> Error {
        Error::NotFound {
            path: "a".into(),
            source: answer.into(),
        }
    }

    #[test]
    fn bucket_is_no_object_that_is_missing() {
        assert!(found::<()>(Err(not_found("NoSuchKey"))).unwrap().is_none());
        let error = found::<()>(Err(not_found("<Code>NoSuchBucket</Code>"))).unwrap_err();
        assert_eq!(io_error(error).kind(), ErrorKind::NotFound);
    }

    #[test]
    fn errors_are_one_line() {
        let answer = "503: <?xml version=\"1.0\"?>\n<Error><Code>SlowDown</Code>\n\
                      <Message>Please  reduce\nyour rate.</Message></Error>";
        assert_eq!(plain(answer), "503: SlowDown: Please reduce your rate.");
        assert_eq!(plain("a <b\nc"), "a <b c");
        assert_eq!(plain(&"é".repeat(MOST)).len(), MOST);
    }
}
