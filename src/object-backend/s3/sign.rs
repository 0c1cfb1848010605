//! Signatures of requests: AWS Signature Version 4 with all of the request in its head.

use std::fmt::Write as _;

use hmac_sha256::{HMAC, Hash};

use super::keys::Keys;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// What a signature is made for.
pub(crate) struct Scope<'a> {
    pub(crate) region: &'a str,
    pub(crate) service: &'a str,
    /// The time as `YYYYMMDDTHHMMSSZ`, in UTC.
    pub(crate) time: &'a str,
}

/// The parts of a request that are signed.
pub(crate) struct Signed<'a> {
    pub(crate) method: &'a str,
    /// The path, encoded.
    pub(crate) path: &'a str,
    /// The query, encoded and in the order of the keys.
    pub(crate) query: &'a str,
    /// The fields with names in lower case, in the order of the names.
    pub(crate) fields: &'a [(&'a str, &'a str)],
    /// The hash of the body in hexadecimal digits.
    pub(crate) body_hash: &'a str,
}

/// Returns the SHA-256 of a body in hexadecimal digits.
pub(crate) fn hash(body: &[u8]) -> String {
    hex(&Hash::hash(body))
}

/// Returns the value of the field `Authorization`.
pub(crate) fn authorization(keys: &Keys, scope: &Scope<'_>, request: &Signed<'_>) -> String {
    let date = scope.time.get(..8).unwrap_or_default();
    let credential = format!("{date}/{}/{}/aws4_request", scope.region, scope.service);
    let names: Vec<&str> = request.fields.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let canonical = hash(canonical(request, &names).as_bytes());
    let text = format!("{ALGORITHM}\n{}\n{credential}\n{canonical}", scope.time);
    let mut key = zeroize::Zeroizing::new(b"AWS4".to_vec());
    key.extend_from_slice(keys.secret.as_bytes());
    let mut signature = HMAC::mac(date.as_bytes(), &**key);
    for part in [scope.region, scope.service, "aws4_request", &text] {
        signature = HMAC::mac(part.as_bytes(), signature);
    }
    let (id, signature) = (&keys.id, hex(&signature));
    format!(
        "{ALGORITHM} Credential={id}/{credential}, SignedHeaders={names}, Signature={signature}"
    )
}

fn canonical(request: &Signed<'_>, names: &str) -> String {
    let Signed { method, path, query, fields, body_hash } = request;
    let mut text = format!("{method}\n{path}\n{query}\n");
    for (name, value) in *fields {
        // Writing to a text cannot fail.
        let _ = writeln!(text, "{name}:{}", value.trim());
    }
    let _ = write!(text, "\n{names}\n{body_hash}");
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn keys(id: &str, secret: &str) -> Keys {
        Keys { id: id.into(), secret: secret.to_owned().into(), token: None }
    }

    /// The test `get-vanilla` of AWS's test suite for Signature Version 4.
    #[test]
    fn the_signature_of_the_test_suite_is_made() {
        let scope = Scope { region: "us-east-1", service: "service", time: "20150830T123600Z" };
        let fields = [("host", "example.amazonaws.com"), ("x-amz-date", scope.time)];
        let signed =
            Signed { method: "GET", path: "/", query: "", fields: &fields, body_hash: &hash(b"") };
        assert_eq!(hash(b""), EMPTY);
        assert_eq!(
            authorization(&keys("AKIDEXAMPLE", SECRET), &scope, &signed),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, \
             SignedHeaders=host;x-amz-date, \
             Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
        );
    }

    /// The examples of the documentation of S3 ("Signature Calculations for the Authorization Header").
    #[test]
    fn the_signatures_of_the_documentation_are_made() {
        let scope = Scope { region: "us-east-1", service: "s3", time: "20130524T000000Z" };
        let host = ("host", "examplebucket.s3.amazonaws.com");
        let (date, empty) = (("x-amz-date", scope.time), ("x-amz-content-sha256", EMPTY));
        let body_hash = hash(b"Welcome to Amazon S3.");
        let put = [
            ("date", "Fri, 24 May 2013 00:00:00 GMT"),
            host,
            ("x-amz-content-sha256", &*body_hash),
            date,
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ];
        let get = [host, ("range", "bytes=0-9"), empty, date];
        let list = [host, empty, date];
        let request = |method, path, query, fields, body_hash| Signed {
            method,
            path,
            query,
            fields,
            body_hash,
        };
        for (signed, signature) in [
            (
                request("GET", "/test.txt", "", &get, EMPTY),
                "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
            (
                request("PUT", "/test%24file.text", "", &put, &*body_hash),
                "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            ),
            (
                request("GET", "/", "max-keys=2&prefix=J", &list, EMPTY),
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ] {
            let keys = keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY");
            let value = authorization(&keys, &scope, &signed);
            assert!(value.ends_with(&format!("Signature={signature}")), "{}: {value}", signed.path);
        }
    }
}
