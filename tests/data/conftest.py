from hypothesis import settings

# Wall time of one example says nothing on a busy machine; the examples themselves stay the default number.
settings.register_profile("data", deadline=None)
settings.load_profile("data")
