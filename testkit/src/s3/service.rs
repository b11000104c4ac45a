//! The S3 operations, as `s3s` hands them over after it has parsed and authenticated the request.

use super::answers::{encode, etag, failed};
use super::bucket::list;
use super::memory::Memory;
use super::meta::Meta;
use super::state::Service;
use super::{multipart, writes};
use async_trait::async_trait;
use futures::{Stream, StreamExt};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

fn check_match(condition: Option<&ETagCondition>, meta: &Meta) -> S3Result<()> {
    let matches = match condition {
        None => true,
        Some(condition) if condition.is_any() => true,
        Some(condition) => condition.as_etag().and_then(|etag| etag.as_strong()) == Some(meta.etag.as_str()),
    };
    if matches { Ok(()) } else { Err(s3_error!(PreconditionFailed, "the object has another ETag")) }
}

/// `s3s` knows no larger sizes; [`unsigned_sizes`] and `serve` undo this.
fn signed(size: u64) -> i64 {
    size.cast_signed()
}

/// A listing in which sizes from 2^63 on are what they claim to be, not negative.
pub(super) fn unsigned_sizes(listing: &str) -> String {
    const TAG: &str = "<Size>-";
    let mut parts = listing.split(TAG);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (digits, rest) = part.split_at(part.find('<').unwrap_or(part.len()));
        let size = format!("-{digits}").parse().map_or(0, i64::cast_unsigned);
        text.push_str(&format!("<Size>{size}{rest}"));
    }
    text
}

#[async_trait]
impl S3 for Service {
    async fn create_bucket(
        &self,
        req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        let mut buckets = self.buckets.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        buckets.entry(req.input.bucket).or_insert_with(|| Arc::new(Memory::default()));
        Ok(S3Response::new(CreateBucketOutput::default()))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
        self.bucket(&req.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let bucket = self.bucket(&input.bucket)?;
        let url = input.encoding_type.as_ref().is_some_and(|kind| kind.as_str() == EncodingType::URL);
        let prefix = input.prefix.unwrap_or_default();
        let max_keys = input.max_keys.unwrap_or(1000).clamp(0, 1000);
        let token = match &input.continuation_token {
            // Opaque to the client; encoded, because XML cannot carry every character.
            Some(token) => Some(
                percent_encoding::percent_decode_str(token)
                    .decode_utf8()
                    .map_err(|e| s3_error!(e, InvalidArgument, "bad continuation token"))?
                    .into_owned(),
            ),
            None => input.start_after.clone(),
        };
        let delimiter = input.delimiter.as_deref().filter(|delimiter| !delimiter.is_empty());
        let page =
            list(&*bucket, &prefix, delimiter, token.as_deref(), self.guard.page_max.min(max_keys as usize))
                .map_err(failed)?;
        let contents = page.objects.iter().map(|(key, meta)| Object {
            key: Some(encode(key, url)),
            size: Some(signed(meta.size)),
            e_tag: etag(meta),
            last_modified: Some(meta.modified.into()),
            ..Object::default()
        });
        let prefixes = page.prefixes.iter().map(|prefix| CommonPrefix { prefix: Some(encode(prefix, url)) });
        let output = ListObjectsV2Output {
            name: Some(input.bucket),
            key_count: Some((page.objects.len() + page.prefixes.len()) as i32),
            max_keys: Some(max_keys),
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page
                .next
                .map(|key| utf8_percent_encode(&key, NON_ALPHANUMERIC).to_string()),
            continuation_token: input.continuation_token,
            contents: Some(contents.collect()),
            common_prefixes: Some(prefixes.collect()),
            delimiter: input.delimiter.map(|delimiter| encode(&delimiter, url)),
            prefix: Some(encode(&prefix, url)),
            start_after: input.start_after.map(|key| encode(&key, url)),
            encoding_type: input.encoding_type,
            ..ListObjectsV2Output::default()
        };
        Ok(S3Response::new(output))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = req.input;
        let (_, meta) = self.object(&input.bucket, &input.key)?;
        check_match(input.if_match.as_ref(), &meta)?;
        let about = meta.about.as_deref().cloned().unwrap_or_default();
        let asks = input.checksum_mode.is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED);
        let output = HeadObjectOutput {
            content_length: Some(signed(meta.size)),
            e_tag: etag(&meta),
            last_modified: Some(meta.modified.into()),
            accept_ranges: Some("bytes".into()),
            content_type: about.content_type,
            metadata: Some(about.metadata.into_iter().collect()),
            ..HeadObjectOutput::default()
        };
        Ok(S3Response::with_headers(output, writes::told(about.checksum.filter(|_| asks).as_ref())))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = req.input;
        let (bucket, meta) = self.object(&input.bucket, &input.key)?;
        check_match(input.if_match.as_ref(), &meta)?;
        let range = match &input.range {
            None => None,
            Some(range) => {
                Some(range.check(meta.size).map_err(|_| s3_error!(InvalidRange, "beyond the end"))?)
            }
        };
        let content_range =
            range.as_ref().map(|range| format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size));
        let range = range.unwrap_or(0..meta.size);
        let length = range.end - range.start;
        let about = meta.about.as_deref().cloned().unwrap_or_default();
        // A part of an object has another checksum than the object.
        let asks = input.checksum_mode.is_some_and(|mode| mode.as_str() == ChecksumMode::ENABLED);
        let checksum = about.checksum.filter(|_| asks && length == meta.size);
        let body = bucket.read(&input.key, &meta, range).map_err(failed)?;
        let output = GetObjectOutput {
            body: Some(StreamingBlob::wrap(Shareable::new(body))),
            content_length: Some(length as i64),
            content_range,
            e_tag: etag(&meta),
            last_modified: Some(meta.modified.into()),
            accept_ranges: Some("bytes".into()),
            content_type: about.content_type,
            metadata: Some(about.metadata.into_iter().collect()),
            ..GetObjectOutput::default()
        };
        Ok(S3Response::with_headers(output, writes::told(checksum.as_ref())))
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        writes::put_object(self, req).await
    }

    async fn copy_object(&self, req: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        writes::copy_object(self, req).await
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        writes::delete_object(self, &req.input)?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        writes::delete_objects(self, req)
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        multipart::create(self, req.input)
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        multipart::put_part(self, req).await
    }

    async fn upload_part_copy(
        &self,
        req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        multipart::copy_part(self, req.input).await
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        multipart::complete(self, req)
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        multipart::abort(self, &req.input)?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        multipart::list(self, req.input)
    }

    async fn list_parts(&self, req: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        multipart::list_parts(self, req.input)
    }
}

/// `s3s` wants bodies that are `Sync`; a stream is only ever polled by its one owner.
pub(super) struct Shareable(Mutex<super::bucket::Body>);

impl Shareable {
    pub(super) fn new(body: super::bucket::Body) -> Self {
        Self(Mutex::new(body))
    }
}

impl Stream for Shareable {
    type Item = std::io::Result<bytes::Bytes>;
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).poll_next_unpin(context)
    }
}
